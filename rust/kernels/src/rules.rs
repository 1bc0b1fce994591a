//! The update rules of `torch.optim` that have a fused kernel.

use crate::optimize::Rule;

/// `torch.optim.SGD` without momentum: `w -= lr * (±g + weight_decay * w)`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sgd {
    sign: f32,
    lr: f32,
    weight_decay: f32,
}

impl Sgd {
    /// Hyper-parameters as torch names them.
    pub fn new(lr: f64, weight_decay: f64, maximize: bool) -> Self {
        Sgd { sign: sign(maximize), lr: lr as f32, weight_decay: weight_decay as f32 }
    }
}

impl Rule<0> for Sgd {
    #[inline(always)]
    fn step(&self, weight: f32, gradient: f32, _: [f32; 0]) -> (f32, [f32; 0]) {
        let gradient = self.sign * gradient + self.weight_decay * weight;
        (weight - self.lr * gradient, [])
    }
}

/// `torch.optim.SGD` with momentum. State: the momentum buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Momentum {
    sgd: Sgd,
    momentum: f32,
    /// 1 - dampening
    share: f32,
    nesterov: bool,
    first: bool,
}

impl Momentum {
    /// Hyper-parameters as torch names them; without momentum (0) torch keeps no buffer: use [`Sgd`]. `first`: there is no momentum buffer yet; it becomes
    /// the gradient, and what is in the state's memory is not looked at.
    pub fn new(sgd: Sgd, momentum: f64, dampening: f64, nesterov: bool, first: bool) -> Self {
        Momentum { sgd, momentum: momentum as f32, share: (1.0 - dampening) as f32, nesterov, first }
    }
}

impl Rule<1> for Momentum {
    #[inline(always)]
    fn step(&self, weight: f32, gradient: f32, [buffer]: [f32; 1]) -> (f32, [f32; 1]) {
        let gradient = self.sgd.sign * gradient + self.sgd.weight_decay * weight;
        let later = buffer * self.momentum + self.share * gradient;
        let buffer = if self.first { gradient } else { later };
        let ahead = gradient + self.momentum * buffer;
        let direction = if self.nesterov { ahead } else { buffer };
        (weight - self.sgd.lr * direction, [buffer])
    }
}

/// `torch.optim.Adam` and `AdamW`, without amsgrad. State: `exp_avg`, `exp_avg_sq`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Adam {
    sign: f32,
    /// Factor of the weight before the step, from decoupled decay.
    keep: f32,
    /// L2 penalty, part of the gradient.
    penalty: f32,
    /// 1 - beta1
    share1: f32,
    /// beta1; `lerp` uses it when the gradient weighs more than the average.
    beta1: f32,
    beta2: f32,
    /// 1 - beta2
    share2: f32,
    correction2_sqrt: f32,
    eps: f32,
    step_size: f32,
}

/// How weight decay acts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Decay {
    /// Added to the gradient (`torch.optim.Adam`).
    Penalty,
    /// Taken off the weight directly (`torch.optim.AdamW`).
    Decoupled,
}

impl Adam {
    /// Hyper-parameters as torch names them. `step`: torch's step count after this update, so 1
    /// at the first one, and one more for a prediction than for the real update before it.
    pub fn new(
        lr: f64,
        (beta1, beta2): (f64, f64),
        eps: f64,
        (weight_decay, decay): (f64, Decay),
        maximize: bool,
        step: u64,
    ) -> Self {
        let correction1 = 1.0 - power(beta1, step);
        let correction2 = 1.0 - power(beta2, step);
        let (keep, penalty) = match decay {
            Decay::Penalty => (1.0, weight_decay),
            Decay::Decoupled => (1.0 - lr * weight_decay, 0.0),
        };
        Adam {
            sign: sign(maximize),
            keep: keep as f32,
            penalty: penalty as f32,
            share1: (1.0 - beta1) as f32,
            beta1: (1.0 - (1.0 - beta1)) as f32,
            beta2: beta2 as f32,
            share2: (1.0 - beta2) as f32,
            correction2_sqrt: correction2.sqrt() as f32,
            eps: eps as f32,
            step_size: (lr / correction1) as f32,
        }
    }
}

impl Rule<2> for Adam {
    #[inline(always)]
    fn step(&self, weight: f32, gradient: f32, [average, square]: [f32; 2]) -> (f32, [f32; 2]) {
        let gradient = self.sign * gradient + self.penalty * weight;
        // torch.lerp takes the form that is exact at the nearer end.
        let change = gradient - average;
        let near = average + self.share1 * change;
        let far = gradient - change * self.beta1;
        let average = if self.share1 < 0.5 { near } else { far };
        let square = square * self.beta2 + self.share2 * gradient * gradient;
        let denominator = square.sqrt() / self.correction2_sqrt + self.eps;
        (weight * self.keep - self.step_size * average / denominator, [average, square])
    }
}

fn sign(maximize: bool) -> f32 {
    if maximize { -1.0 } else { 1.0 }
}

/// By repeated squaring: the C library's `pow` may differ in the last bit from CPU to CPU.
fn power(mut base: f64, mut exponent: u64) -> f64 {
    let mut result = 1.0;
    while exponent > 0 {
        if exponent & 1 == 1 {
            result *= base;
        }
        base *= base;
        exponent >>= 1;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Three steps of three weights; `rule` gets the step count.
    fn three_steps<R: Rule<K>, const K: usize>(rule: impl Fn(u64) -> R) -> [[f32; 3]; 3] {
        let gradients = [[0.1, -0.2, 0.3], [0.25, 0.0, -0.4], [-0.05, 0.15, 0.2]];
        // The state starts as rubbish where the first step must not look at it.
        let start = if K == 1 { f32::NAN } else { 0.0 };
        let (mut weights, mut state) = ([0.5, -1.25, 2.0], [[start; K]; 3]);
        for (at, gradient) in gradients.iter().enumerate() {
            for i in 0..3 {
                (weights[i], state[i]) = rule(at as u64 + 1).step(weights[i], gradient[i], state[i]);
            }
        }
        let part = |k: usize| std::array::from_fn(|i| state[i].get(k).copied().unwrap_or(0.0));
        [weights, part(0), part(1)]
    }

    fn assert_close(ours: [[f32; 3]; 3], torch: [[f32; 3]; 3]) {
        for (ours, torch) in ours.as_flattened().iter().zip(torch.as_flattened()) {
            assert!((ours - torch).abs() <= 4e-7 * torch.abs().max(0.1), "{ours} instead of torch's {torch}");
        }
    }

    // The values are those of torch 2.15 with foreach=False on a CPU.

    #[test]
    fn sgd_equals_torch() {
        let ours = three_steps(|_| Sgd::new(0.1, 0.0, false));
        assert_close(ours, [[0.47, -1.245, 1.99], [0.0; 3], [0.0; 3]]);
        let ours = three_steps(|_| Sgd::new(0.1, 0.01, true));
        assert_close(ours, [[0.528_456_5, -1.251_213_7, 2.003_986_1], [0.0; 3], [0.0; 3]]);
    }

    #[test]
    fn momentum_equals_torch() {
        let ours = three_steps(|step| Momentum::new(Sgd::new(0.1, 0.01, false), 0.9, 0.5, false, step == 1));
        assert_close(
            ours,
            [[0.449_596_32, -1.198_140_6, 1.938_431_4], [0.177_089_26, -0.108_699_42, 0.197_847_1], [0.0; 3]],
        );
        let ours = three_steps(|step| Momentum::new(Sgd::new(0.1, 0.0, false), 0.9, 0.0, true, step == 1));
        assert_close(ours, [[0.407_36, -1.209_72, 1.967_23], [0.255_999_98, -0.011_999_98, 0.083_000_01], [0.0; 3]]);
    }

    #[test]
    fn adam_equals_torch() {
        let ours = three_steps(|step| Adam::new(0.1, (0.9, 0.999), 1e-8, (0.01, Decay::Penalty), false, step));
        assert_close(
            ours,
            [
                [0.244_499_86, -1.068_192_7, 1.897_988_4],
                [0.026_670_639, -0.004_326_569, 0.013_543_911],
                [7.765_816e-5, 6.457_735e-5, 0.000_295_233_13],
            ],
        );
    }

    #[test]
    fn adamw_equals_torch_also_where_lerp_changes_its_form() {
        let ours = three_steps(|step| Adam::new(0.1, (0.4, 0.99), 1e-3, (0.05, Decay::Decoupled), true, step));
        assert_close(
            ours,
            [
                [0.724_655_7, -1.317_757_8, 2.030_836_8],
                [-0.039_599_996, -0.070_800_01, -0.052_800_01],
                [0.000_741_76, 0.000_617_04, 0.002_866_09],
            ],
        );
    }

    #[test]
    fn powers() {
        assert_eq!((power(0.9, 0), power(0.9, 1), power(0.5, 10)), (1.0, 0.9, 1.0 / 1024.0));
        let (ours, libm) = (power(0.999, 123_456), 0.999f64.powf(123_456.0));
        assert!((ours / libm - 1.0).abs() < 1e-10, "{ours} {libm}");
    }
}
