//! What drafters for models have in common.

use draftsmith_theory::Calibration;

use crate::cascade::Cascade;
use crate::drafter::{Drafter, StepDrafter};
use crate::max_gram::MaxGramDraft;
use crate::merged::MergedDraft;
use crate::session::ModelSession;

/// A drafter for a model.
pub trait ModelDrafter<'m>: Drafter<ModelSession<'m>> {
    /// From now on the head's predictions are calibrated so, or given as they are; nothing where
    /// there is no head. A calibration belongs to a way of decoding, so that a drafter for several
    /// changes it between them.
    fn set_calibration(&mut self, calibration: Option<&'m Calibration>) {
        let _ = calibration;
    }

    /// Its steps, which can be recorded; None where it does not draft step by step.
    fn by_steps(&mut self) -> Option<&mut (dyn StepDrafter<ModelSession<'m>> + 'm)> {
        None
    }

    /// Where the target's session must let its shallow layers run ahead, if it must.
    fn exit_layer(&self) -> Option<usize> {
        None
    }
}

impl<'m> ModelDrafter<'m> for MaxGramDraft<'m> {}

impl<'m> ModelDrafter<'m> for Cascade<'m, ModelSession<'m>> {
    fn exit_layer(&self) -> Option<usize> {
        self.exit_layer()
    }
}

impl<'m> ModelDrafter<'m> for MergedDraft<'m, ModelSession<'m>> {
    fn exit_layer(&self) -> Option<usize> {
        self.exit_layer()
    }
}
