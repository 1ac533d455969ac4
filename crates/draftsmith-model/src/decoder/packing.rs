//! A decoder's parts with packed weights, made of those that are tensors.

use super::attention::Attention;
use super::mlp::Mlp;
use super::rope::Rope;
use crate::packed::{PackedAttention, PackedMlp, RopeTable};

impl Attention {
    pub(crate) fn packed(&self) -> PackedAttention {
        let (num_heads, num_kv_heads) = self.num_heads();
        PackedAttention::new(self.norm(), self.projections(), num_heads, num_kv_heads)
    }
}

impl Mlp {
    pub(crate) fn packed(&self) -> PackedMlp {
        let (gate, up_and_down) = self.projections();
        PackedMlp::new(self.norm(), gate, up_and_down)
    }
}

impl Rope {
    pub(crate) fn packed(&self) -> RopeTable {
        let (halves, half) = self.halves();
        RopeTable::new(halves, half)
    }
}
