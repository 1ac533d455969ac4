//! RMS norm and LayerNorm.

use burn::module::{Module, Param};
use burn::tensor::{Device, FloatDType, Tensor, TensorData, module::layer_norm};

use super::kernels::Kernels;
use crate::spec::{NamedNorm, NormForm, NormSpec};
use crate::weights::NamedTensor;

/// A norm with its weights. If a checkpoint stores weights minus 1, the 1 has been added. Weights
/// and all steps are f32 even in a bf16 model, because bf16 would be too coarse for sums of squares
/// and for 1 + w.
#[derive(Module, Debug)]
pub(crate) struct Norm {
    gamma: Param<Tensor<1>>,
    /// The shift of a LayerNorm; `None` for an RMS norm.
    beta: Option<Param<Tensor<1>>>,
    epsilon: f64,
}

impl Norm {
    /// Builds a norm from its weights, and from its biases if it is a LayerNorm. If checkpoints
    /// store weights minus 1, the 1 has been added already.
    pub(crate) fn new(
        spec: &NormSpec,
        weight: Vec<f32>,
        bias: Option<Vec<f32>>,
        device: &Device,
    ) -> Self {
        let width = weight.len();
        let parameter = |values| Param::from_data(TensorData::new(values, [width]), device);
        Self { gamma: parameter(weight), beta: bias.map(parameter), epsilon: spec.epsilon }
    }

    /// Builds a norm that neither scales nor shifts.
    pub(crate) fn ones(norm: NamedNorm<'_>, device: &Device) -> Self {
        let NamedNorm { width, spec, .. } = norm;
        let bias = (spec.form == NormForm::Layer).then(|| vec![0.0; width]);
        Self::new(spec, vec![1.0; width], bias, device)
    }

    /// Returns the norm of weights that a checkpoint stores minus 1.
    pub(crate) fn plus_one(&self) -> Self {
        Self { gamma: Param::from_tensor(self.gamma() + 1.0), ..self.clone() }
    }

    /// Returns the scale.
    pub(crate) fn gamma(&self) -> Tensor<1> {
        self.gamma.val()
    }

    /// Returns the shift of a LayerNorm; `None` for an RMS norm.
    pub(crate) fn beta(&self) -> Option<Tensor<1>> {
        self.beta.as_ref().map(Param::val)
    }

    /// Lists the tensors in a checkpoint's layout.
    pub(crate) fn named(&self, norm: NamedNorm<'_>) -> Vec<NamedTensor> {
        if norm.is_absent() {
            return Vec::new();
        }
        let (name, spec) = (norm.name(), norm.spec);
        let mut weight = NamedTensor::from_tensor(&format!("{name}.weight"), self.gamma());
        weight.values.iter_mut().for_each(|weight| *weight -= spec.offset());
        let bias = self.beta().map(|beta| NamedTensor::from_tensor(&format!("{name}.bias"), beta));
        [weight].into_iter().chain(bias).collect()
    }

    /// Normalises the last dimension and returns it in the type of the input.
    pub(crate) fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        // A norm that is trained is on an autodiff device, and may read constants that are not.
        if let Some(kernels) = Kernels::on(&self.gamma().device())
            && Kernels::on(&x.device()).is_some()
        {
            return self.forward_with(kernels, x, None);
        }
        let (dtype, shape) = (FloatDType::from(x.dtype()), x.shape());
        // Rows are reshaped to a matrix, because burn compiles kernels for every number of
        // dimensions.
        let x = x.cast(FloatDType::F32).reshape([-1, shape[D - 1] as i32]);
        let normed: Tensor<2> = match self.beta() {
            Some(beta) => layer_norm(x, self.gamma(), Some(beta), self.epsilon),
            None => {
                let size = x.clone().square().mean_dim(1) + self.epsilon;
                x * size.powf_scalar(-0.5) * self.gamma().unsqueeze()
            }
        };
        normed.cast(dtype).reshape(shape)
    }

    /// Computes [`Self::forward`] in one launch, and adds a residual if given.
    pub(super) fn forward_with<const D: usize>(
        &self,
        kernels: Kernels,
        x: Tensor<D>,
        residual: Option<Tensor<D>>,
    ) -> Tensor<D> {
        kernels.norm(x, (self.gamma(), self.beta()), residual, self.epsilon)
    }

    /// Returns the width of a row.
    pub(super) fn width(&self) -> usize {
        self.gamma.dims()[0]
    }

    /// Returns the number that is added to the mean square or variance.
    pub(super) fn epsilon(&self) -> f64 {
        self.epsilon
    }
}
