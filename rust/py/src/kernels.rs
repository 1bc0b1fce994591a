//! Vector math on addresses: `tensor.data_ptr()` and a number of elements.
//!
//! Who passes an address promises that so many elements lie there, and that no other thread touches them
//! until the call returns. Everything runs without the GIL.

use mdas_core::error::Error;
use mdas_kernels::Level;
use mdas_kernels::optimize::{self, Forward, Gradient, Rule};
use mdas_kernels::rules;
use pyo3::prelude::*;

use crate::errors;

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
    py.detach(|| job.run()).map_err(|message| errors::to_python(py, &Error::Invalid(message)))
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
    fn run(&self) -> Result<(), String> {
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

    /// Written memory must not be anybody else's.
    fn check(&self) -> Result<(), String> {
        let mut areas: Vec<(&str, usize, bool)> = vec![("base", self.base, true)];
        areas.extend(self.state.iter().map(|&address| ("state", address, true)));
        areas.extend(self.forward.map(|address| ("forward", address, true)));
        for update in [self.real, self.prediction].into_iter().flatten() {
            areas.push(("gradient", update.gradient, false));
            areas.extend(update.local.map(|address| ("local", address, false)));
        }
        let bytes = self.count.checked_mul(size_of::<f32>()).ok_or("count is too large")?;
        if bytes == 0 {
            return Ok(());
        }
        for (i, &(name, start, written)) in areas.iter().enumerate() {
            if start == 0 || !start.is_multiple_of(align_of::<f32>()) || start.checked_add(bytes).is_none() {
                return Err(format!("{name} at {start:#x} is not the address of {} float32 elements", self.count));
            }
            for &(other, at, also_written) in &areas[..i] {
                if (written || also_written) && start < at + bytes && at < start + bytes {
                    return Err(format!("{name} overlaps {other}, and one of them is written to"));
                }
            }
        }
        if self.prediction.is_some() && self.forward.is_none() {
            return Err("a prediction needs forward weights to write to".into());
        }
        Ok(())
    }

    fn run_as<R: Rule<K>, const K: usize>(&self, pick: impl Fn(RuleKind) -> Option<R>) -> Result<(), String> {
        let update = |update: Option<Update>| match update {
            None => Ok(None),
            Some(update) => match pick(update.rule) {
                Some(rule) => Ok(Some(self.update(update, rule))),
                None => Err("real update and prediction follow different rules".to_owned()),
            },
        };
        let (real, prediction) = (update(self.real)?, update(self.prediction)?);
        let state: [usize; K] = self
            .state
            .as_slice()
            .try_into()
            .map_err(|_| format!("the rule keeps {K} numbers of state per element, but got {}", self.state.len()))?;
        // SAFETY: by `check`, the areas that are written to overlap nothing; who called promises the rest.
        let (base, state) = unsafe { (written(self.base, self.count), state.map(|at| written(at, self.count))) };
        let forward = match (self.forward, prediction) {
            (None, _) => Forward::Absent,
            // SAFETY: as above.
            (Some(at), None) => Forward::Base(unsafe { written(at, self.count) }),
            // SAFETY: as above.
            (Some(at), Some(update)) => Forward::Predicted(unsafe { written(at, self.count) }, update),
        };
        optimize::update(base, state, real, forward);
        Ok(())
    }

    fn update<R>(&self, update: Update, rule: R) -> optimize::Update<'_, R> {
        // SAFETY: by `check`, nothing that is written to overlaps a gradient; who called promises the rest.
        let read = |at| unsafe { read(at, self.count) };
        let gradient = match update.local {
            None => Gradient::Plain(read(update.gradient)),
            Some(local) => Gradient::Blend { shared: read(update.gradient), local: read(local), alpha: update.alpha },
        };
        optimize::Update { rule, gradient, scale: update.scale }
    }
}

/// # Safety
///
/// `count` elements lie at `address` (any address will do for none), and nobody writes to them during `'a`.
unsafe fn read<'a>(address: usize, count: usize) -> &'a [f32] {
    if count == 0 {
        return &[];
    }
    // SAFETY: see above.
    unsafe { std::slice::from_raw_parts(address as *const f32, count) }
}

/// # Safety
///
/// `count` elements lie at `address` (any address will do for none), and nobody else touches them during `'a`.
unsafe fn written<'a>(address: usize, count: usize) -> &'a mut [f32] {
    if count == 0 {
        return &mut [];
    }
    // SAFETY: see above.
    unsafe { std::slice::from_raw_parts_mut(address as *mut f32, count) }
}

/// The vector instructions that the kernels use on this machine.
#[pyfunction]
pub(crate) fn cpu_level() -> &'static str {
    Level::best().name()
}
