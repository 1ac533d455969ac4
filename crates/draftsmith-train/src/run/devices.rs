//! A training's devices: what is the same on each of them, and a thread for each.
//!
//! The batches of a step are dealt out, the n-th to device n modulo their number. There the frozen
//! model runs, and what is trained goes forward and back; gradients come to the first device, which
//! adds them in the order of the batches and takes the step, and the others get its weights. So a
//! step's sums are one device's, in one device's order, and its bits too where devices are alike.
//!
//! burn-train's `MultiDevicesTrainStep` does the like, and could not be taken: it hands gradients
//! over in the order in which devices finish, without whose they are, sends all weights
//! with each batch, trains one model at a time, and reads a data loader a device, which would have
//! to agree on where steps end.
//!
//! Threads stay: CubeCL gives each thread that uses a GPU a stream, and memory of its own with it.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use draftsmith_model::{CausalLm, DrafterModel};
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::TrainError;

/// One of something for each device, in the devices' order.
#[derive(Debug, Clone)]
pub(crate) struct PerDevice<T> {
    /// At least one.
    all: Vec<T>,
    /// One a device. None for a single device, whose work is done where it is asked for.
    threads: Option<Arc<ThreadPool>>,
}

impl<T> From<T> for PerDevice<T> {
    /// Of a single device.
    fn from(only: T) -> Self {
        Self { all: vec![only], threads: None }
    }
}

impl<T> PerDevice<T> {
    /// Of at least one device, each with a thread.
    pub(crate) fn new(all: Vec<T>) -> Result<Self, TrainError> {
        let threads = match all.len() {
            1 => None,
            num_devices => {
                let name = |nth| format!("device-{nth}");
                let pool = ThreadPoolBuilder::new().num_threads(num_devices).thread_name(name);
                let pool = pool.build().map_err(|e| TrainError::Device(e.to_string()))?;
                Some(Arc::new(pool))
            }
        };
        Ok(Self { all, threads })
    }

    /// The number of devices.
    pub(crate) fn num_devices(&self) -> usize {
        self.all.len()
    }

    /// That of the first device, which takes the steps.
    pub(crate) fn first(&self) -> &T {
        &self.all[0]
    }

    /// Those of the other devices.
    pub(crate) fn others(&self) -> &[T] {
        &self.all[1..]
    }

    /// That of the device which the n-th batch of a step goes to.
    pub(crate) fn of_batch(&self, nth: usize) -> &T {
        &self.all[nth % self.all.len()]
    }

    /// Something for each, made of its own.
    pub(crate) fn map<U>(self, make: impl FnMut(T) -> U) -> PerDevice<U> {
        PerDevice { all: self.all.into_iter().map(make).collect(), threads: self.threads }
    }

    /// Works on the first `num_used` devices at once, each on its own thread. Results are in the
    /// devices' order.
    pub(crate) fn work<U: Send>(
        &self,
        num_used: usize,
        work: impl Fn(usize, &T) -> U + Sync,
    ) -> Vec<U>
    where
        T: Sync,
    {
        let used = &self.all[..num_used];
        match &self.threads {
            Some(threads) => {
                let results = threads.broadcast(|thread| {
                    let nth = thread.index();
                    used.get(nth).map(|own| work(nth, own))
                });
                results.into_iter().flatten().collect()
            }
            None => used.iter().map(|own| work(0, own)).collect(),
        }
    }
}

/// A frozen model: a target or a drafter.
pub(crate) trait Frozen: Module {
    /// Where its weights are.
    fn place(&self) -> Device;
}

impl Frozen for CausalLm {
    fn place(&self) -> Device {
        self.device()
    }
}

impl Frozen for DrafterModel {
    fn place(&self) -> Device {
        self.device()
    }
}

impl<M: Frozen> PerDevice<M> {
    /// A frozen model, without autodiff, on its own device and on more.
    pub(crate) fn frozen(model: M, more: &[Device]) -> Result<Self, TrainError> {
        let copies = more.iter().map(|device| model.clone().fork(&device.clone().inner()));
        Self::new(std::iter::once(model.clone()).chain(copies).collect())
    }

    /// Where what is trained beside it is, with autodiff. Its threads are others: both work at
    /// once.
    pub(crate) fn trained(&self) -> Result<PerDevice<Device>, TrainError> {
        PerDevice::new(self.all.iter().map(|model| model.place().autodiff()).collect())
    }
}

impl PerDevice<Device> {
    /// Whether all are the CPU.
    pub(crate) fn is_cpu(&self) -> bool {
        self.all.iter().all(|device| device.clone().inner() == Device::flex())
    }

    /// What each member makes of each of some batches, on the batch's device: for each member, in
    /// the order of the batches. `models` are those of the members on each device.
    pub(crate) fn work_of_members<L: Sync, U: Send>(
        &self,
        num_batches: usize,
        models: &[Vec<&L>],
        work: impl Fn(&L, usize) -> U + Sync,
    ) -> Vec<Vec<U>> {
        let is_cpu = self.is_cpu();
        let of_batches = self.work(num_batches, |nth, _| {
            side_by_side(models[nth].clone(), is_cpu, |model| work(model, nth))
        });
        let mut of_members: Vec<Vec<U>> = models[0].iter().map(|_| Vec::new()).collect();
        for of_batch in of_batches {
            for (of_member, made) in of_members.iter_mut().zip(of_batch) {
                of_member.push(made);
            }
        }
        of_members
    }
}

/// Works on each of several members, on all cores if they are on the CPU. Results are in order, and
/// none depends on another.
pub(crate) fn side_by_side<T: Send, U: Send>(
    members: Vec<T>,
    on_cpu: bool,
    work: impl Fn(T) -> U + Send + Sync,
) -> Vec<U> {
    if on_cpu && members.len() > 1 {
        members.into_par_iter().map(work).collect()
    } else {
        members.into_iter().map(work).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn each_device_has_a_thread_of_its_own_and_all_work_at_once() {
        let devices = PerDevice::new(vec!["a", "b", "c"]).unwrap();
        let thread = || std::thread::current().id();
        let threads = |num_used| {
            // Would wait for ever if one began after another.
            let barrier = Barrier::new(num_used);
            devices.work(num_used, |nth, own| {
                barrier.wait();
                assert_eq!(*own, ["a", "b", "c"][nth]);
                thread()
            })
        };
        let all = threads(3);
        assert!(
            all[0] != all[1] && all[1] != all[2] && all[0] != all[2] && !all.contains(&thread())
        );
        for num_used in [1, 3, 2] {
            assert_eq!(threads(num_used), all[..num_used]);
        }
        let only = PerDevice::from("a");
        assert_eq!(only.work(1, |_, _| thread()), [thread()]);
        assert_eq!([0, 1, 2, 3].map(|nth| *devices.of_batch(nth)), ["a", "b", "c", "a"]);
    }

    #[test]
    fn members_work_with_their_models_of_each_batchs_device() {
        let models = [vec![&"head 0 on a", &"head 1 on a"], vec![&"head 0 on b", &"head 1 on b"]];
        for (num_batches, expected) in [
            (1, [["0: head 0 on a"].as_slice(), &["0: head 1 on a"]]),
            (2, [&["0: head 0 on a", "1: head 0 on b"], &["0: head 1 on a", "1: head 1 on b"]]),
        ] {
            let devices = PerDevice::new(vec![Device::flex(), Device::flex()]).unwrap();
            let work = |model: &&str, nth: usize| format!("{nth}: {model}");
            assert_eq!(devices.work_of_members(num_batches, &models, work), expected);
        }
    }
}
