//! The devices of a training, each with its own threads and copy of the models.
//!
//! The number of devices changes only the speed of a training. Batch n of a step goes to device n
//! modulo the number of devices. That device runs the frozen model, and each member's forward and
//! backward pass, on the batch. The first device adds the gradients in the order of the batches and
//! takes the step; the others receive its weights. So the number of devices affects neither which
//! rows share a forward nor the order of sums, and it is not part of a fingerprint. If all devices
//! compute alike, results are equal bit for bit.
//!
//! burn-train's `MultiDevicesTrainStep` is not used: it adds gradients in the order in which devices
//! finish, does not say which device they come from, sends all weights with each batch, trains one model
//! at a time, and needs one data loader per device; these would have to agree on the ends of steps.
//!
//! The threads live as long as the training, because CubeCL gives each thread that uses a GPU a separate
//! stream and memory pool.

use std::sync::Arc;

use burn::module::Module;
use burn::tensor::Device;
use rayon::prelude::*;
use rayon::{ThreadPool, ThreadPoolBuilder};

use crate::error::{Result, TrainError};

/// One value for each device.
#[derive(Debug, Clone)]
pub(crate) struct PerDevice<T> {
    /// The values, in the order of the devices. There is at least one.
    all: Vec<T>,
    /// One thread pool per device. Empty if there is one device only: its work is done on the
    /// calling thread.
    threads: Arc<[ThreadPool]>,
}

impl<T> From<T> for PerDevice<T> {
    fn from(only: T) -> Self {
        Self { all: vec![only], threads: Arc::default() }
    }
}

impl<T> PerDevice<T> {
    /// Wraps one value per device, and creates a thread pool for each device if there are several.
    /// `all` must not be empty.
    pub(crate) fn new(all: Vec<T>, threads_a_device: usize) -> Result<Self> {
        let num_pools = if all.len() == 1 { 0 } else { all.len() };
        let threads = (0..num_pools).map(|nth| {
            let name = move |_| format!("device-{nth}");
            let pool = ThreadPoolBuilder::new().num_threads(threads_a_device).thread_name(name);
            pool.build().map_err(|e| TrainError::Device(e.to_string()))
        });
        Ok(Self { all, threads: threads.collect::<Result<_, _>>()? })
    }

    pub(crate) fn num_devices(&self) -> usize {
        self.all.len()
    }

    /// Returns the first device's value. That device takes the optimizer steps.
    pub(crate) fn first(&self) -> &T {
        &self.all[0]
    }

    /// Returns the values of the other devices.
    pub(crate) fn others(&self) -> &[T] {
        &self.all[1..]
    }

    /// Returns the value of the device for the n-th batch of a step.
    pub(crate) fn of_batch(&self, nth: usize) -> &T {
        &self.all[nth % self.all.len()]
    }

    pub(crate) fn map<U>(self, make: impl FnMut(T) -> U) -> PerDevice<U> {
        PerDevice { all: self.all.into_iter().map(make).collect(), threads: self.threads }
    }

    /// Runs `work` concurrently for each of the first `num_used` devices, on the threads of that
    /// device. Results are in the order of the devices.
    pub(crate) fn work<U: Send>(
        &self,
        num_used: usize,
        work: impl Fn(usize, &T) -> U + Sync,
    ) -> Vec<U>
    where
        T: Sync,
    {
        let used = &self.all[..num_used];
        if self.threads.is_empty() {
            return used.iter().map(|value| work(0, value)).collect();
        }
        let mut results: Vec<Option<U>> = used.iter().map(|_| None).collect();
        let work = |nth: usize| work(nth, &used[nth]);
        on_each(&self.threads, 0, &mut results, &work);
        results.into_iter().flatten().collect()
    }
}

impl<M: Module> PerDevice<M> {
    /// Copies a frozen model, without autodiff, to more devices. The given model stays on its own
    /// device.
    pub(crate) fn frozen(model: M, more: &[Device]) -> Result<Self> {
        let copies = more.iter().map(|device| model.clone().fork(&device.clone().inner()));
        Self::new(std::iter::once(model.clone()).chain(copies).collect(), threads_a_device(more))
    }
}

impl PerDevice<Device> {
    /// Lists the devices of the trained models, with autodiff. They have separate threads, so that
    /// the frozen model can run at the same time.
    pub(crate) fn trained(first: Device, more: &[Device]) -> Result<Self> {
        let all = std::iter::once(&first).chain(more);
        let all = all.map(|device| device.clone().autodiff());
        Self::new(all.collect(), threads_a_device(more))
    }

    /// Returns whether every device is a CPU.
    pub(crate) fn is_cpu(&self) -> bool {
        self.all.iter().all(is_cpu)
    }

    /// Runs `work` for every member and each of the next batches, on the batch's device. `models`
    /// contains the members' models on each device. Results are ordered by member, then by batch.
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
            for (of_member, result) in of_members.iter_mut().zip(of_batch) {
                of_member.push(result);
            }
        }
        of_members
    }
}

/// Runs `work(first + n)` on the n-th pool and stores its result as the n-th, for all pools
/// concurrently. Waits for all of them.
fn on_each<U: Send>(
    pools: &[ThreadPool],
    first: usize,
    results: &mut [Option<U>],
    work: &(impl Fn(usize) -> U + Sync),
) {
    if let (Some((pool, pools)), Some((result, results))) =
        (pools.split_first(), results.split_first_mut())
    {
        pool.in_place_scope(|scope| {
            scope.spawn(|_| *result = Some(work(first)));
            on_each(pools, first + 1, results, work);
        });
    }
}

fn is_cpu(device: &Device) -> bool {
    device.clone().inner() == Device::flex()
}

/// Returns the number of threads in each device's pool; `more` are the devices besides the first.
/// Pools on the CPU share its cores, and a GPU needs one thread.
fn threads_a_device(more: &[Device]) -> usize {
    match more.iter().all(is_cpu) {
        true => (rayon::current_num_threads() / (more.len() + 1)).max(1),
        false => 1,
    }
}

/// Runs `work` for each member, on all cores if the members are on the CPU. Results are in the
/// order of the members.
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
    fn devices_work_concurrently_on_separate_threads() {
        let devices = PerDevice::new(vec!["a", "b", "c"], 1).unwrap();
        let thread = || std::thread::current().id();
        let threads = |num_used| {
            // This would block forever if the devices worked one after another.
            let barrier = Barrier::new(num_used);
            devices.work(num_used, |nth, name| {
                barrier.wait();
                assert_eq!(*name, ["a", "b", "c"][nth]);
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
    fn members_use_their_models_on_each_batchs_device() {
        let models = [vec![&"head 0 on a", &"head 1 on a"], vec![&"head 0 on b", &"head 1 on b"]];
        for (num_batches, expected) in [
            (1, [["0: head 0 on a"].as_slice(), &["0: head 1 on a"]]),
            (2, [&["0: head 0 on a", "1: head 0 on b"], &["0: head 1 on a", "1: head 1 on b"]]),
        ] {
            let devices = PerDevice::new(vec![Device::flex(), Device::flex()], 1).unwrap();
            let work = |model: &&str, nth: usize| format!("{nth}: {model}");
            assert_eq!(devices.work_of_members(num_batches, &models, work), expected);
        }
    }
}
