//! Rows of numbers, one per token: hidden states inside a model, or logits at its end. Rows of
//! several sequences can share a forward. Consecutive rows of one sequence are a run; it has the
//! sequence's cache slot and continues the tokens cached there.
//!
//! On a device, rows are padded to a few different numbers ([`DeviceRows`]).
//!
//! [`CausalLm::embed_ids`] decides where rows are stored: in host memory if the model's weights are
//! packed, otherwise on the model's device. Code that computes with rows leaves them there, and
//! callers need not know. On a device, rows have the model's type, except logits, which are f32.
//! Rows in host memory are always f32.
//!
//! [`CausalLm::embed_ids`]: crate::CausalLm::embed_ids

use std::borrow::Cow;
use std::ops::Range;

use burn::tensor::{Device, FloatDType, Int, Tensor};

use crate::buckets::padded_rows;
use crate::error::{ModelError, Result};
use crate::vectors;

/// Rows of consecutive tokens of one or several sequences.
#[derive(Debug, Clone)]
pub struct Rows {
    pub(crate) place: RowData,
    slots: Slots,
}

/// A run of consecutive rows, which are the next tokens of one sequence, in order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Run {
    /// The sequence's slot in the cache.
    pub(crate) slot: usize,
    /// The number of rows, which is the number of tokens.
    pub(crate) num_rows: usize,
}

/// The sequences that rows belong to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Slots {
    One(Run),
    /// Two or more runs. Neighbouring runs have different slots.
    Several(Vec<Run>),
}

impl FromIterator<Run> for Slots {
    fn from_iter<T: IntoIterator<Item = Run>>(all: T) -> Self {
        let mut runs: Vec<Run> = Vec::new();
        for run in all.into_iter().filter(|run| run.num_rows > 0) {
            match runs.last_mut() {
                Some(last) if last.slot == run.slot => last.num_rows += run.num_rows,
                _ => runs.push(run),
            }
        }
        match runs[..] {
            [] => Self::One(Run { slot: 0, num_rows: 0 }),
            [only] => Self::One(only),
            _ => Self::Several(runs),
        }
    }
}

/// The storage of rows: in host memory or on a device.
#[derive(Debug, Clone)]
pub(crate) enum RowData {
    Host(HostRows),
    Device(DeviceRows),
}

/// Rows on a device, followed by padding (see [`padded_rows`]). Padding rows contain arbitrary
/// finite numbers that are never used.
#[derive(Debug, Clone)]
pub(crate) struct DeviceRows {
    /// The rows, then the padding: `[1, rows and padding, width]`.
    pub(crate) tensor: Box<Tensor<3>>,
    pub(crate) num_rows: usize,
}

impl DeviceRows {
    /// Counts the rows of padding.
    pub(crate) fn num_padding(&self) -> usize {
        self.tensor.dims()[1] - self.num_rows
    }

    /// Looks up rows of a table, `[numbers, width]`.
    pub(crate) fn looked_up<'a>(table: Tensor<2>, ids: impl Iterator<Item = &'a u32>) -> Self {
        let mut ids: Vec<i32> = ids.map(|id| *id as i32).collect();
        let num_rows = ids.len();
        ids.resize(padded_rows(num_rows), 0);
        let ids = Tensor::<1, Int>::from_ints(&ids[..], &table.device());
        Self { tensor: Box::new(table.select(0, ids).unsqueeze()), num_rows }
    }

    /// Applies a function to all rows, including padding.
    ///
    /// # Shapes
    /// - of_all: from and to `[1, rows and padding, width]`
    pub(crate) fn map(self, of_all: impl FnOnce(Tensor<3>) -> Tensor<3>) -> Self {
        Self { tensor: Box::new(of_all(*self.tensor)), num_rows: self.num_rows }
    }

    /// Selects rows and pads them again.
    fn select(&self, rows: impl Iterator<Item = usize>) -> Self {
        let mut rows: Vec<i32> = rows.map(|row| row as i32).collect();
        let num_rows = rows.len();
        let last = rows.last().copied();
        rows.extend(last.into_iter().cycle().take(padded_rows(num_rows) - num_rows));
        let rows = Tensor::<1, Int>::from_ints(&rows[..], &self.tensor.device());
        Self { tensor: Box::new(Tensor::clone(&self.tensor).select(1, rows)), num_rows }
    }

    /// Returns the rows without padding, `[1, rows, width]`.
    fn without_padding(self) -> Tensor<3> {
        if self.num_padding() == 0 { *self.tensor } else { self.tensor.narrow(1, 0, self.num_rows) }
    }
}

impl RowData {
    /// Converts to rows in host memory, which copies them if they are on a device.
    pub(crate) fn into_host(self) -> HostRows {
        match self {
            Self::Host(rows) => rows,
            Self::Device(rows) => {
                let [_, _, width] = rows.tensor.dims();
                let rows = rows.without_padding().cast(FloatDType::F32);
                HostRows { values: vectors::values(rows), width }
            }
        }
    }

    /// Returns the rows in host memory. They are borrowed if they are already there.
    pub(crate) fn host(&self) -> Cow<'_, HostRows> {
        match self {
            Self::Host(rows) => Cow::Borrowed(rows),
            Self::Device(_) => Cow::Owned(self.clone().into_host()),
        }
    }

    /// Converts to rows on a device. Rows in host memory are copied to `device`.
    pub(crate) fn into_device(self, device: &Device) -> DeviceRows {
        match self {
            Self::Host(HostRows { mut values, width }) => {
                let num_rows = values.len() / width;
                let num_padded = padded_rows(num_rows);
                values.resize(num_padded * width, 0.0);
                let tensor = vectors::tensor(values, [1, num_padded, width], device);
                DeviceRows { tensor: Box::new(tensor), num_rows }
            }
            Self::Device(rows) => rows,
        }
    }
}

/// Rows in host memory, contiguous.
#[derive(Debug, Clone)]
pub(crate) struct HostRows {
    pub(crate) values: Vec<f32>,
    pub(crate) width: usize,
}

impl From<HostRows> for RowData {
    fn from(rows: HostRows) -> Self {
        Self::Host(rows)
    }
}

impl From<Tensor<3>> for DeviceRows {
    /// Treats all rows of a tensor as rows without padding.
    fn from(tensor: Tensor<3>) -> Self {
        let [_, num_rows, _] = tensor.dims();
        Self { tensor: Box::new(tensor), num_rows }
    }
}

impl From<DeviceRows> for RowData {
    fn from(rows: DeviceRows) -> Self {
        Self::Device(rows)
    }
}

/// Treats the rows of a tensor `[1, rows, width]` as rows of slot 0, on the tensor's device.
impl From<Tensor<3>> for Rows {
    fn from(tensor: Tensor<3>) -> Self {
        Self::of_slot_0(DeviceRows::from(tensor))
    }
}

impl Slots {
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> {
        let runs = match self {
            Self::One(run) => std::slice::from_ref(run),
            Self::Several(runs) => runs,
        };
        runs.iter().copied()
    }

    pub(crate) fn rows(self, place: impl Into<RowData>) -> Rows {
        Rows { place: place.into(), slots: self }
    }
}

impl Rows {
    /// Wraps rows in host memory of `width` numbers each, for the sequence in slot 0.
    pub fn of_host(values: Vec<f32>, width: usize) -> Self {
        Self::of_slot_0(HostRows { values, width })
    }

    /// Assigns rows to the sequence in slot 0.
    pub(crate) fn of_slot_0(place: impl Into<RowData>) -> Self {
        let place = place.into();
        let num_rows = match &place {
            RowData::Host(rows) => rows.values.len() / rows.width,
            RowData::Device(rows) => rows.num_rows,
        };
        Slots::One(Run { slot: 0, num_rows }).rows(place)
    }

    /// Counts the rows, without padding.
    pub fn num_rows(&self) -> usize {
        self.runs().map(|run| run.num_rows).sum()
    }

    /// Lists the runs of the rows, in order.
    pub(crate) fn runs(&self) -> impl Iterator<Item = Run> {
        self.slots.runs()
    }

    /// Splits the rows into those of each run, with its slot.
    pub fn by_run(&self) -> impl Iterator<Item = (usize, Self)> {
        let mut end = 0;
        self.runs().map(move |Run { slot, num_rows }| {
            let start = end;
            end += num_rows;
            (slot, self.slice(start..end))
        })
    }

    /// Assigns the rows to the sequence in `slot`.
    #[must_use]
    pub fn in_slot(self, slot: usize) -> Self {
        Slots::One(Run { slot, num_rows: self.num_rows() }).rows(self.place)
    }

    pub(crate) fn into_parts(self) -> (RowData, Slots) {
        (self.place, self.slots)
    }

    /// Applies a function to the rows in host memory, and to their slots.
    pub(crate) fn on_host(self, of_all: impl FnOnce(&mut Vec<f32>, &Slots)) -> Self {
        let mut rows = self.place.into_host();
        of_all(&mut rows.values, &self.slots);
        self.slots.rows(rows)
    }

    /// Applies a function to the rows on a device, including padding, and to their slots.
    pub(crate) fn on_device(
        self,
        device: &Device,
        of_all: impl FnOnce(DeviceRows, &Slots) -> DeviceRows,
    ) -> Self {
        let rows = of_all(self.place.into_device(device), &self.slots);
        self.slots.rows(rows)
    }

    /// Applies a function to the rows on a device, including padding.
    ///
    /// # Shapes
    /// - of_all: from and to `[1, rows and padding, width]`
    pub(crate) fn map_on(
        self,
        device: &Device,
        of_all: impl FnOnce(Tensor<3>) -> Tensor<3>,
    ) -> Self {
        self.on_device(device, |rows, _| rows.map(of_all))
    }

    /// Adds the numbers of `other`, which has as many rows, in the same place and with the same
    /// padding.
    pub(crate) fn plus(&self, other: &Self) -> Self {
        match (&self.place, &other.place) {
            (RowData::Device(one), RowData::Device(other)) => {
                let sum = |own: Tensor<3>| own + Tensor::clone(&other.tensor);
                self.with_place(one.clone().map(sum))
            }
            (one, other) => {
                let (mut one, other) = (one.clone().into_host(), other.host());
                one.values.iter_mut().zip(&other.values).for_each(|(own, added)| *own += added);
                self.with_place(one)
            }
        }
    }

    /// Returns rows with the same runs and other numbers.
    pub(crate) fn with_place(&self, place: impl Into<RowData>) -> Self {
        self.slots.clone().rows(place)
    }

    /// Returns a range of the rows.
    ///
    /// # Panics
    /// If the range ends after the last row.
    pub fn slice(&self, range: Range<usize>) -> Self {
        if range == (0..self.num_rows()) {
            return self.clone();
        }
        let slots = self.slots_of(&range);
        match &self.place {
            RowData::Host(HostRows { values, width }) => {
                let values = values[range.start * width..range.end * width].to_vec();
                slots.rows(HostRows { values, width: *width })
            }
            RowData::Device(rows) => slots.rows(rows.select(range)),
        }
    }

    /// Returns the runs in a range of the rows.
    fn slots_of(&self, range: &Range<usize>) -> Slots {
        let mut end = 0;
        let cut = self.runs().filter_map(|run| {
            let start = end;
            end += run.num_rows;
            let num_rows = range.end.min(end).saturating_sub(range.start.max(start));
            (num_rows > 0).then_some(Run { num_rows, ..run })
        });
        cut.collect()
    }

    /// Returns the last `num` rows.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn last(self, num: usize) -> Self {
        let num_rows = self.num_rows();
        if num == num_rows { self } else { self.slice(num_rows - num..num_rows) }
    }

    /// Returns the last rows of each run. `nums` gives the number of rows for each run; a shorter
    /// run is kept whole.
    pub fn last_of_each(self, nums: impl Iterator<Item = usize> + Clone) -> Self {
        if let Slots::One(_) = self.slots {
            let num = nums.into_iter().next().unwrap_or(0).min(self.num_rows());
            return self.last(num);
        }
        if self.runs().zip(nums.clone()).all(|(run, num)| run.num_rows <= num) {
            return self;
        }
        let mut end = 0;
        let parts = self.runs().zip(nums).map(|(run, num)| {
            end += run.num_rows;
            self.slice(end - num.min(run.num_rows)..end)
        });
        Self::cat(parts)
    }

    /// Concatenates rows. The result is in host memory if any part is there.
    ///
    /// # Panics
    /// If there are none, or their widths differ.
    pub fn cat(parts: impl IntoIterator<Item = Self>) -> Self {
        let mut parts: Vec<Self> = parts.into_iter().collect();
        if parts.len() == 1 {
            return parts.swap_remove(0);
        }
        let slots: Slots = parts.iter().flat_map(Self::runs).collect();
        let on_device = parts.iter().map(|part| match &part.place {
            RowData::Host(_) => None,
            RowData::Device(rows) => Some(rows),
        });
        if let Some(parts) = on_device.collect::<Option<Vec<_>>>() {
            let rows = parts.iter().scan(0, |end, part| {
                let start = *end;
                *end += part.num_rows + part.num_padding();
                Some(start..start + part.num_rows)
            });
            let all = parts.iter().map(|part| Tensor::clone(&part.tensor)).collect();
            return slots.rows(DeviceRows::from(Tensor::cat(all, 1)).select(rows.flatten()));
        }
        let mut all = HostRows { values: Vec::new(), width: 0 };
        for part in &parts {
            let rows = part.place.host();
            assert!(all.width == 0 || all.width == rows.width, "rows of one width");
            all.width = rows.width;
            all.values.extend_from_slice(&rows.values);
        }
        slots.rows(all)
    }

    /// Joins the rows of several matrices: each row of the first with the same row of the others.
    /// The result is in host memory if any part is there.
    pub(crate) fn side_by_side<'a>(parts: impl IntoIterator<Item = &'a Self>) -> Self {
        let parts: Vec<&Self> = parts.into_iter().collect();
        let on_device = parts.iter().map(|part| match &part.place {
            RowData::Host(_) => None,
            RowData::Device(rows) => Some(Tensor::clone(&rows.tensor)),
        });
        let num_rows = parts[0].num_rows();
        if let Some(tensors) = on_device.collect::<Option<Vec<_>>>() {
            let tensor = Box::new(Tensor::cat(tensors, 2));
            return parts[0].with_place(DeviceRows { tensor, num_rows });
        }
        let on_host: Vec<_> = parts.iter().map(|part| part.place.host()).collect();
        let mut values = Vec::with_capacity(on_host.iter().map(|part| part.values.len()).sum());
        for row in 0..num_rows {
            for part in &on_host {
                values.extend_from_slice(&part.values[row * part.width..][..part.width]);
            }
        }
        let width = on_host.iter().map(|part| part.width).sum();
        parts[0].with_place(HostRows { values, width })
    }

    /// Copies the values of each part to host memory, row by row. All parts on a device are read at
    /// once, with one sync.
    ///
    /// # Errors
    /// If the device fails.
    pub fn to_host<const N: usize>(parts: [Self; N]) -> Result<[Vec<f32>; N]> {
        let mut on_device = Vec::new();
        for part in &parts {
            if let RowData::Device(DeviceRows { tensor, .. }) = &part.place {
                let values = Tensor::clone(tensor).cast(FloatDType::F32);
                on_device.push(values.reshape([tensor.shape().num_elements()]));
            }
        }
        let mut brought = match on_device.len() {
            0 => Vec::new(),
            1 => read(on_device.swap_remove(0))?,
            _ => read(Tensor::cat(on_device, 0))?,
        };
        Ok(parts.map(|part| match part.place {
            RowData::Host(rows) => rows.values,
            RowData::Device(DeviceRows { tensor, num_rows }) => {
                let [_, num_padded, width] = tensor.dims();
                let rest = brought.split_off(num_padded * width);
                let mut values = std::mem::replace(&mut brought, rest);
                values.truncate(num_rows * width);
                values
            }
        }))
    }

    /// Returns the rows as a tensor. Rows in host memory are copied to `device`.
    ///
    /// # Shapes
    /// - output: `[1, rows, width]`
    pub fn into_tensor(self, device: &Device) -> Tensor<3> {
        self.place.into_device(device).without_padding()
    }
}

fn read(tensor: Tensor<1>) -> Result<Vec<f32>> {
    let data = tensor.try_into_data().map_err(|e| ModelError::Device(e.to_string()))?;
    data.try_into_vec().map_err(|e| ModelError::Device(format!("{e:?}")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::TensorData;

    /// Makes rows of two numbers that identify the row.
    fn example(range: Range<usize>, on_host: bool) -> Rows {
        let num_rows = range.len();
        let values: Vec<f32> = range.flat_map(|row| [row as f32, -(row as f32)]).collect();
        if on_host {
            Rows::of_slot_0(HostRows { values, width: 2 })
        } else {
            let data = TensorData::new(values, [1, num_rows, 2]);
            Tensor::<3>::from_data(data, &Device::flex()).into()
        }
    }

    fn values(rows: Rows) -> Vec<f32> {
        let [values] = Rows::to_host([rows]).expect("brought");
        values
    }

    #[test]
    fn rows_in_either_place_are_sliced_and_concatenated_alike() {
        for first in [false, true] {
            for second in [false, true] {
                let parts = [example(0..3, first), example(3..7, second)];
                let all = Rows::cat(parts.clone());
                assert_eq!(all.num_rows(), 7);
                assert_eq!(values(all.clone()), values(example(0..7, true)));
                assert_eq!(values(all.slice(2..5)), values(example(2..5, true)));
                assert_eq!(values(all.clone().last(4)), values(example(3..7, true)));
                assert_eq!(values(all.clone().last(7)), values(all));
            }
        }
    }

    #[test]
    fn slices_keep_the_slots_of_their_rows() {
        let of = |rows: &Rows| -> Vec<(usize, usize)> {
            rows.runs().map(|run| (run.slot, run.num_rows)).collect()
        };
        for on_host in [false, true] {
            let part = |range, slot| example(range, on_host).in_slot(slot);
            let parts = [part(0..2, 3), part(2..3, 3), part(3..7, 0), part(7..8, 1)];
            let all = Rows::cat(parts.clone());
            assert_eq!(of(&all), [(3, 3), (0, 4), (1, 1)]);
            assert_eq!(of(&all.slice(2..8)), [(3, 1), (0, 4), (1, 1)]);
            assert_eq!(of(&all.slice(4..6)), [(0, 2)]);
            assert_eq!(of(&all.slice(0..3)), [(3, 3)]);
            assert_eq!(of(&all.last(2)), [(0, 1), (1, 1)]);
        }
    }

    #[test]
    fn several_parts_copied_to_the_host_at_once_equal_each_copied_alone() {
        for places in [[false; 3], [true; 3], [false, true, false], [true, false, true]] {
            let [a, b, c] = places;
            let parts = [example(0..2, a), example(5..6, b), example(8..11, c)];
            let expected = parts.clone().map(values);
            assert_eq!(Rows::to_host(parts).expect("brought"), expected);
        }
    }
}
