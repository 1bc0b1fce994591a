//! The fused update and prediction.

use mdas_kernels::optimize::{self, Forward, Gradient, Rule};
use mdas_kernels::rules;
use pyo3::prelude::*;

use super::{Area, Refused, check, detached};

/// `torch.optim.SGD` under these hyper-parameters. Optimizer state: none without momentum, else the buffer;
/// `first`: there is no buffer yet, it becomes the gradient.
#[pyclass(frozen, module = "mdas._core")]
#[derive(Clone, Copy)]
pub(crate) struct Sgd {
    plain: rules::Sgd,
    momentum: Option<rules::Momentum>,
}

#[pymethods]
impl Sgd {
    #[new]
    #[pyo3(signature = (lr, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=false, maximize=false, first=false))]
    fn new(
        lr: f64,
        momentum: f64,
        dampening: f64,
        weight_decay: f64,
        nesterov: bool,
        maximize: bool,
        first: bool,
    ) -> Self {
        let plain = rules::Sgd::new(lr, weight_decay, maximize);
        let with_momentum = || rules::Momentum::new(plain, momentum, dampening, nesterov, first);
        Self { plain, momentum: (momentum != 0.0).then(with_momentum) }
    }
}

/// `torch.optim.Adam` (`decoupled=False`) or `AdamW` under these hyper-parameters, without amsgrad. Optimizer
/// state: `exp_avg`, `exp_avg_sq`. `step`: torch's step count after this update, 1 for the first one.
#[pyclass(frozen, module = "mdas._core")]
#[derive(Clone, Copy)]
pub(crate) struct Adam(rules::Adam);

#[pymethods]
impl Adam {
    #[new]
    #[pyo3(signature = (lr, beta1, beta2, eps, weight_decay, decoupled, step, maximize=false))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments")]
    fn new(
        lr: f64,
        beta1: f64,
        beta2: f64,
        eps: f64,
        weight_decay: f64,
        decoupled: bool,
        step: u64,
        maximize: bool,
    ) -> Self {
        let decay = if decoupled { rules::Decay::Decoupled } else { rules::Decay::Penalty };
        Self(rules::Adam::new(lr, (beta1, beta2), eps, (weight_decay, decay), maximize, step))
    }
}

#[derive(FromPyObject)]
enum AnyRule<'py> {
    Sgd(PyRef<'py, Sgd>),
    Adam(PyRef<'py, Adam>),
}

#[derive(Clone, Copy)]
enum RuleKind {
    Sgd(rules::Sgd),
    Momentum(rules::Momentum),
    Adam(rules::Adam),
}

/// An update rule with its gradient. `gradient`: address of a float32 gradient; with `local`, the address of a
/// second one: `gradient + (1 - alpha) * (local - gradient)`. Either is multiplied by `scale`.
#[pyclass(frozen, module = "mdas._core")]
#[derive(Clone, Copy)]
pub(crate) struct Update {
    rule: RuleKind,
    gradient: usize,
    local: Option<usize>,
    alpha: f32,
    scale: f32,
}

#[pymethods]
impl Update {
    #[new]
    #[pyo3(signature = (rule, gradient, local=None, alpha=1.0, scale=1.0))]
    fn new(rule: AnyRule<'_>, gradient: usize, local: Option<usize>, alpha: f32, scale: f32) -> Self {
        let rule = match rule {
            AnyRule::Sgd(sgd) => sgd.momentum.map_or(RuleKind::Sgd(sgd.plain), RuleKind::Momentum),
            AnyRule::Adam(adam) => RuleKind::Adam(adam.0),
        };
        Self { rule, gradient, local, alpha, scale }
    }
}

/// `count` float32 elements in one pass: the weights at `base` and the optimizer state at `state` move by
/// `real`, if given. Then the weights at `forward`, if given, become those that `prediction` would lead to (a
/// copy of `base` without one), which leaves no trace in the state.
#[pyfunction]
#[pyo3(signature = (count, base, state, real=None, forward=None, prediction=None))]
pub(crate) fn fused_update(
    py: Python<'_>,
    count: usize,
    base: usize,
    state: Vec<usize>,
    real: Option<PyRef<'_, Update>>,
    forward: Option<usize>,
    prediction: Option<PyRef<'_, Update>>,
) -> PyResult<()> {
    let job = Job { count, base, state, real: real.map(|u| *u), forward, prediction: prediction.map(|u| *u) };
    detached(py, || job.run())
}

/// Arguments of [`fused_update`].
struct Job {
    count: usize,
    base: usize,
    state: Vec<usize>,
    real: Option<Update>,
    forward: Option<usize>,
    prediction: Option<Update>,
}

impl Job {
    fn run(&self) -> Result<(), Refused> {
        self.check()?;
        match self.real.or(self.prediction).map(|update| update.rule) {
            None | Some(RuleKind::Sgd(_)) => self.run_as(|rule| match rule {
                RuleKind::Sgd(rule) => Some(rule),
                _ => None,
            }),
            Some(RuleKind::Momentum(_)) => self.run_as(|rule| match rule {
                RuleKind::Momentum(rule) => Some(rule),
                _ => None,
            }),
            Some(RuleKind::Adam(_)) => self.run_as(|rule| match rule {
                RuleKind::Adam(rule) => Some(rule),
                _ => None,
            }),
        }
    }

    fn area(&self, name: &'static str, address: usize) -> Area {
        Area::new(name, address, self.count)
    }

    fn check(&self) -> Result<(), Refused> {
        let mut written = vec![self.area("base", self.base)];
        written.extend(self.state.iter().map(|&address| self.area("state", address)));
        written.extend(self.forward.map(|address| self.area("forward", address)));
        let mut read = Vec::new();
        for update in [self.real, self.prediction].into_iter().flatten() {
            read.push(self.area("gradient", update.gradient));
            read.extend(update.local.map(|address| self.area("local", address)));
        }
        if self.prediction.is_some() && self.forward.is_none() {
            return Err("a prediction needs forward weights to write to".into());
        }
        check(&written, &read)
    }

    fn run_as<R: Rule<K>, const K: usize>(&self, pick: impl Fn(RuleKind) -> Option<R>) -> Result<(), Refused> {
        let update = |update: Option<Update>| match update {
            None => Ok(None),
            Some(update) => match pick(update.rule) {
                Some(rule) => Ok(Some(self.update(update, rule))),
                None => Err("real update and prediction follow different rules".to_owned()),
            },
        };
        let (real, prediction) = (update(self.real)?, update(self.prediction)?);
        let state: [usize; K] =
            self.state.as_slice().try_into().map_err(|_| {
                format!("the rule keeps {K} numbers of state per element, but got {}", self.state.len())
            })?;
        // SAFETY: `check` has passed; who calls promises the rest.
        let write = |name, address| unsafe { self.area(name, address).write() };
        let forward = match (self.forward, prediction) {
            (None, _) => Forward::Absent,
            (Some(address), None) => Forward::Base(write("forward", address)),
            (Some(address), Some(update)) => Forward::Predicted(write("forward", address), update),
        };
        optimize::update(write("base", self.base), state.map(|address| write("state", address)), real, forward);
        Ok(())
    }

    fn update<R>(&self, update: Update, rule: R) -> optimize::Update<'_, R> {
        // SAFETY: `check` has passed; who calls promises the rest.
        let read = |address| unsafe { self.area("gradient", address).read() };
        let gradient = match update.local {
            None => Gradient::Plain(read(update.gradient)),
            Some(local) => Gradient::Blend { shared: read(update.gradient), local: read(local), alpha: update.alpha },
        };
        optimize::Update { rule, gradient, scale: update.scale }
    }
}
