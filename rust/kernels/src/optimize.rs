//! The optimizer's step fused with the prediction of the next one: one pass over memory.
//!
//! A step of delayed training applies the average that has arrived (the *real* update), and then
//! looks ahead: the forward weights are those that a second update with the predicted average
//! would give, whose optimizer state is thrown away.
//!
//! The update rules are those of `torch.optim` (SGD, Adam and AdamW with `foreach=False`), in the same order of
//! operations; they equal torch's to rounding, since torch uses fused multiply-add where the CPU has it.

use crate::convert::Arch;
use crate::dispatch::{Kernel, dispatch};
use crate::lanes::{LANES, load, map, store, zip};

/// How one element is updated, with `K` numbers of optimizer state.
///
/// `step` has to be `#[inline(always)]` and should have no data-dependent branches.
pub trait Rule<const K: usize>: Copy {
    /// New weight and state from weight, gradient and state.
    fn step(&self, weight: f32, gradient: f32, state: [f32; K]) -> (f32, [f32; K]);
}

/// A gradient that an update is made with.
#[derive(Clone, Copy, Debug)]
pub enum Gradient<'a> {
    /// As it is.
    Plain(&'a [f32]),
    /// `shared + (1 - alpha) * (local - shared)`: the confidence `alpha` in the part that all ranks
    /// share, the rest for this rank's own gradient.
    Blend {
        /// Equal on all ranks: the history gradient, with a sketch or without.
        shared: &'a [f32],
        /// This rank's gradient.
        local: &'a [f32],
        /// Confidence in `shared`, in \[0, 1\].
        alpha: f32,
    },
}

/// An update: rule with its hyper-parameters, gradient, and a factor for the gradient (clipping,
/// unscaling).
#[derive(Clone, Copy, Debug)]
pub struct Update<'a, R> {
    /// The rule under the hyper-parameters that apply to this gradient.
    pub rule: R,
    /// The gradient.
    pub gradient: Gradient<'a>,
    /// What the gradient is multiplied with; 1 for nothing.
    pub scale: f32,
}

/// Where the forward weights go, and what is predicted for them.
#[derive(Debug)]
pub enum Forward<'a, R> {
    /// The forward weights are the base weights themselves.
    Absent,
    /// A copy of the base weights: no prediction.
    Base(&'a mut [f32]),
    /// The base weights after one more update, which leaves no trace in the optimizer state.
    Predicted(&'a mut [f32], Update<'a, R>),
}

/// Updates `base` and `state` with `real`, if there is one, and writes the forward weights.
///
/// All slices are as long as `base`. One and the same slice may be read in several places (the
/// arrived average is often the history gradient of the prediction).
///
/// # Panics
/// If the lengths differ.
pub fn update<R: Rule<K>, const K: usize>(
    base: &mut [f32],
    state: [&mut [f32]; K],
    real: Option<Update<'_, R>>,
    forward: Forward<'_, R>,
) {
    let n = base.len();
    let forward_fits = match &forward {
        Forward::Absent => true,
        Forward::Base(out) => out.len() == n,
        Forward::Predicted(out, update) => out.len() == n && update.gradient.fits(n),
    };
    assert!(
        forward_fits && state.iter().all(|part| part.len() == n) && real.iter().all(|real| real.gradient.fits(n)),
        "optimizer state, gradients and forward weights must be as long as the {n} weights"
    );
    dispatch(Fused { base, state, real, forward });
}

impl<'a> Gradient<'a> {
    /// The blend, or `shared` alone if `alpha` is 1: then `local` is not read, and a non-finite value
    /// in it does no harm.
    pub fn blend(shared: &'a [f32], local: &'a [f32], alpha: f32) -> Self {
        if alpha == 1.0 { Gradient::Plain(shared) } else { Gradient::Blend { shared, local, alpha } }
    }

    fn fits(&self, n: usize) -> bool {
        match self {
            Gradient::Plain(g) => g.len() == n,
            Gradient::Blend { shared, local, .. } => shared.len() == n && local.len() == n,
        }
    }

    #[inline(always)]
    fn block<const N: usize>(&self, at: usize) -> [f32; N] {
        match self {
            Gradient::Plain(g) => load(g, at),
            Gradient::Blend { shared, local, alpha } => {
                let rest = 1.0 - alpha;
                zip(load(shared, at), load(local, at), |c: f32, g: f32| c + rest * (g - c))
            }
        }
    }
}

impl<R> Update<'_, R> {
    #[inline(always)]
    fn block<const K: usize, const N: usize>(
        &self,
        at: usize,
        weights: [f32; N],
        state: [[f32; N]; K],
    ) -> ([f32; N], [[f32; N]; K])
    where
        R: Rule<K>,
    {
        let gradient = map(self.gradient.block::<N>(at), |g| g * self.scale);
        let (mut new_weights, mut new_state) = ([0.0; N], [[0.0; N]; K]);
        for i in 0..N {
            let (weight, parts) = self.rule.step(weights[i], gradient[i], std::array::from_fn(|k| state[k][i]));
            new_weights[i] = weight;
            for k in 0..K {
                new_state[k][i] = parts[k];
            }
        }
        (new_weights, new_state)
    }
}

struct Fused<'a, 'b, R, const K: usize> {
    base: &'a mut [f32],
    state: [&'a mut [f32]; K],
    real: Option<Update<'b, R>>,
    forward: Forward<'b, R>,
}

impl<R: Rule<K>, const K: usize> Fused<'_, '_, R, K> {
    #[inline(always)]
    fn block<const N: usize>(&mut self, at: usize) {
        let mut weights = load(self.base, at);
        let mut state = self.state.each_ref().map(|part| load::<_, N>(part, at));
        if let Some(real) = &self.real {
            (weights, state) = real.block(at, weights, state);
            store(self.base, at, weights);
            self.state.iter_mut().zip(state).for_each(|(part, block)| store(part, at, block));
        }
        match &mut self.forward {
            Forward::Absent => {}
            Forward::Base(out) => store(out, at, weights),
            Forward::Predicted(out, update) => store(out, at, update.block(at, weights, state).0),
        }
    }
}

impl<R: Rule<K>, const K: usize> Kernel for Fused<'_, '_, R, K> {
    type Output = ();
    #[inline(always)]
    fn run<A: Arch>(mut self) {
        let whole = self.base.len() - self.base.len() % LANES;
        for at in (0..whole).step_by(LANES) {
            self.block::<LANES>(at);
        }
        for at in whole..self.base.len() {
            self.block::<1>(at);
        }
    }
}
