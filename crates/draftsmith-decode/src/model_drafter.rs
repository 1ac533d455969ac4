//! What drafters made of models have in common.

use draftsmith_theory::Calibration;

use crate::drafter::StepDrafter;
use crate::session::ModelSession;

/// A drafter for a model: one whose steps can be recorded, and whose head can be calibrated.
pub trait ModelDrafter<'m>: StepDrafter<ModelSession<'m>> {
    /// From now on the head's predictions are calibrated so, or given as they are. A calibration
    /// belongs to a way of decoding, so that a drafter for several changes it between them.
    fn set_calibration(&mut self, calibration: Option<&'m Calibration>);

    /// Where the target's session must let its shallow layers run ahead, if it must.
    fn exit_layer(&self) -> Option<usize> {
        None
    }
}
