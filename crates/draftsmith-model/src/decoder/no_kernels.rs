//! The types of `kernels.rs` for builds without a GPU, where no device has kernels.

use burn::tensor::{DType, Device, Int, Tensor};

use super::block::{Attending, BlockTensors};
use crate::spec::Activation;

/// The kernels of a device. The type has no values, since there are none.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Kernels {}

/// The same as in `kernels.rs`.
#[derive(Debug, Clone, Copy)]
#[expect(dead_code, reason = "nothing is applied")]
pub(crate) enum Then {
    Nothing,
    Activate(Activation),
    Gate(Activation),
}

pub(crate) fn num_splits(_: usize) -> usize {
    0
}

impl Kernels {
    pub(crate) fn on(_: &Device) -> Option<Self> {
        None
    }

    pub(crate) fn suit(_: usize, _: DType) -> bool {
        false
    }

    pub(crate) fn norm<const D: usize>(
        self,
        _: Tensor<D>,
        _: (Tensor<1>, Option<Tensor<1>>),
        _: Option<Tensor<D>>,
        _: f64,
    ) -> Tensor<D> {
        match self {}
    }

    pub(crate) fn project(
        self,
        _: Tensor<2>,
        _: (Tensor<2>, Option<Tensor<1>>),
        _: Option<Tensor<2>>,
        _: Then,
        _: DType,
    ) -> Tensor<2> {
        match self {}
    }

    pub(crate) fn product(lhs: Tensor<4>, rhs: Tensor<4>) -> Tensor<4> {
        lhs.matmul(rhs)
    }

    pub(crate) fn mlp(self, _: Tensor<3>, _: Tensor<3>, _: BlockTensors, _: Then) -> Tensor<3> {
        match self {}
    }

    pub(crate) fn attention(
        self,
        _: (Tensor<3>, Tensor<3>),
        _: BlockTensors,
        _: [Tensor<4>; 2],
        _: Option<[Tensor<1>; 2]>,
        _: (Tensor<2>, Tensor<2, Int>),
        _: Attending,
    ) -> (Tensor<3>, [Tensor<4>; 2]) {
        match self {}
    }
}
