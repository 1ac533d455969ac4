use half::f16;

use super::*;

const KINDS: [QuantType; 8] = [
    QuantType::Q8_0,
    QuantType::Q4_0,
    QuantType::Q4_1,
    QuantType::Q5_0,
    QuantType::Q5_1,
    QuantType::Q4K,
    QuantType::Q5K,
    QuantType::Q6K,
];

/// A generator of random numbers (SplitMix64).
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut bits = self.0;
        bits = (bits ^ bits >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        bits = (bits ^ bits >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        bits ^ bits >> 31
    }

    fn below(&mut self, end: usize) -> usize {
        (self.bits() % end as u64) as usize
    }

    /// Draws from a normal distribution, approximately: a sum of twelve uniform numbers.
    fn normal(&mut self) -> f32 {
        let sum: f64 = (0..12).map(|_| self.bits() as f64 / u64::MAX as f64).sum();
        (sum - 6.0) as f32
    }

    fn normals(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.normal()).collect()
    }

    /// Draws rows of a file: random bits with moderate scales.
    fn file_rows(&mut self, kind: QuantType, inputs: usize, outputs: usize) -> Vec<u8> {
        let num_blocks = inputs / kind.block_len() * outputs;
        let mut raw = Vec::new();
        for _ in 0..num_blocks {
            let start = raw.len();
            raw.extend((0..kind.block_bytes()).map(|_| self.bits() as u8));
            let halves: &[usize] = match kind {
                QuantType::Q6K => &[208],
                kind if kind.scales().has_minimum() => &[0, 2],
                _ => &[0],
            };
            for at in halves {
                let scale = f16::from_f32(0.01 * self.normal());
                raw[start + at..][..2].copy_from_slice(&scale.to_le_bytes());
            }
        }
        raw
    }
}

fn all_instructions() -> Vec<Instructions> {
    let mut all = vec![Instructions::Portable(Portable)];
    #[cfg(target_arch = "x86_64")]
    {
        all.extend(lanes::Avx2::try_new().map(Instructions::Avx2));
        all.extend(lanes::Avx2::try_new().map(Instructions::AvxVnni));
        all.extend(lanes::Vnni::try_new().map(Instructions::Vnni));
    }
    all
}

fn lines(kind: QuantType, inputs: usize, outputs: usize, raw: &[u8]) -> QuantisedLines {
    let mut lines = QuantisedLines::zeros(kind, inputs, outputs);
    // In two parts, as projections are packed side by side.
    let (first, rest) = raw.split_at(raw.len() / outputs * (outputs / 3));
    lines.set_rows(0, first);
    lines.set_rows(outputs / 3, rest);
    lines
}

fn read(lines: &QuantisedLines, outputs: impl Iterator<Item = usize>) -> Vec<f32> {
    let mut values = Vec::new();
    outputs.for_each(|output| lines.read_output(output, &mut values));
    values
}

fn quantised(x: &[f32], inputs: usize, kind: QuantType) -> QuantisedRows {
    QuantisedRows::new(x, inputs, kind.row_form())
}

fn product(lines: &QuantisedLines, x: &[f32], instructions: Instructions) -> Vec<f32> {
    let rows = quantised(x, lines.inputs, lines.kind);
    let mut output = vec![f32::NAN; rows.num_rows * lines.outputs];
    lines.multiply_with(instructions, 0..lines.outputs, &rows, &mut output);
    output
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Computes a product of a row and an output's weights, in the order of `kernel`.
fn model(kind: QuantType, raw: &[u8], x: &[f32]) -> f32 {
    let mut sum = 0.0f32;
    let blocks = raw.chunks_exact(kind.block_bytes()).zip(x.chunks_exact(kind.block_len()));
    for (raw, x) in blocks {
        let block = QuantBlock::parse(kind, raw);
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let factor = if largest == 0.0 { 0.0 } else { 127.0 / largest };
        let x_scale = match kind.row_form() {
            _ if largest == 0.0 => 0.0,
            RowForm::Per32 => largest / 127.0,
            RowForm::Per256 => 1.0 / factor,
        };
        let x: Vec<i32> = x.iter().map(|x| (x * factor).round_ties_even() as i32).collect();
        let [scale, minimum] = block.halves.map(|half| f16::from_bits(half).to_f32());
        let (mut block_sum, mut minimum_sum) = (0.0f32, 0);
        for (group, (quants, x)) in block.quants.chunks(GROUP).zip(x.chunks(GROUP)).enumerate() {
            let [first, second] = block.scales[group];
            minimum_sum += x.iter().sum::<i32>()
                * if kind.scales() == Scales::Nested { -i32::from(second) } else { 1 };
            let part_len = GROUP / kind.scales().num_parts();
            for (part, (quants, x)) in quants.chunks(part_len).zip(x.chunks(part_len)).enumerate() {
                let scale = match kind.scales() {
                    Scales::Half | Scales::HalfAndMinimum => scale,
                    Scales::Nested => scale * f32::from(first),
                    Scales::NestedHalves => scale * f32::from([first, second][part] as i8),
                };
                let weights = quants.iter().map(|quant| i32::from(*quant) - kind.offset());
                let product: i32 = weights.zip(x).map(|(weight, x)| weight * x).sum();
                block_sum = (product as f32).mul_add(scale, block_sum);
            }
        }
        if kind.scales().has_minimum() {
            block_sum = (minimum_sum as f32).mul_add(minimum, block_sum);
        }
        sum = block_sum.mul_add(x_scale, sum);
    }
    sum
}

#[test]
fn packed_weights_have_the_bits_of_a_file() {
    let mut random = Random(0);
    for kind in KINDS {
        let raw = random.file_rows(kind, 512, 35);
        let mut expected = Vec::new();
        raw.chunks_exact(kind.block_bytes())
            .for_each(|raw| QuantBlock::parse(kind, raw).widen_into(kind, &mut expected));
        assert_eq!(bits(&read(&lines(kind, 512, 35, &raw), 0..35)), bits(&expected), "{kind:?}");
    }
}

#[test]
fn rows_are_independent_and_instructions_agree_with_the_scalar_model() {
    let mut random = Random(1);
    for (kind, shape) in KINDS.into_iter().flat_map(|kind| (0..6).map(move |shape| (kind, shape))) {
        let inputs = kind.block_len() * (1 + random.below(1 + 768 / kind.block_len()));
        let outputs = [1, 16, 100][shape % 3] + random.below(60);
        let raw = random.file_rows(kind, inputs, outputs);
        let lines = lines(kind, inputs, outputs, &raw);
        let mut x = random.normals(17 * inputs);
        x[inputs..2 * inputs].fill(0.0);
        let row_bytes = raw.len() / outputs;
        let expected: Vec<f32> = x
            .chunks_exact(inputs)
            .flat_map(|x| raw.chunks_exact(row_bytes).map(|raw| model(kind, raw, x)))
            .collect();
        for instructions in all_instructions() {
            for num_rows in 1..=17 {
                let found = product(&lines, &x[..num_rows * inputs], instructions);
                let case = format!("{kind:?} {inputs}x{outputs} {instructions:?} {num_rows} rows");
                assert!(bits(&found) == bits(&expected[..num_rows * outputs]), "{case}");
            }
        }
        // A part of the outputs, in another batch.
        let rows = quantised(&x[3 * inputs..8 * inputs], inputs, kind);
        let columns = outputs / 2 / LINE * LINE..outputs;
        let mut part = vec![0.0; 5 * columns.len()];
        lines.multiply(columns.clone(), &rows, &mut part);
        for (row, part) in part.chunks_exact(columns.len()).enumerate() {
            let expected = &expected[(3 + row) * outputs..][columns.clone()];
            assert_eq!(bits(part), bits(expected), "{kind:?}, columns {columns:?}");
        }
    }
}

#[test]
fn sixty_four_rows_are_sixty_four_times_one() {
    let mut random = Random(2);
    for kind in KINDS {
        let (inputs, outputs) = (512, 300);
        let lines = lines(kind, inputs, outputs, &random.file_rows(kind, inputs, outputs));
        let x = random.normals(64 * inputs);
        let best = Instructions::best();
        let single: Vec<f32> =
            x.chunks_exact(inputs).flat_map(|x| product(&lines, x, best)).collect();
        assert_eq!(bits(&product(&lines, &x, best)), bits(&single), "{kind:?}");
    }
}

#[test]
fn a_product_differs_from_that_of_dequantised_weights_by_the_rounding_of_rows() {
    let mut random = Random(3);
    for kind in KINDS {
        let (inputs, outputs) = (1024, 200);
        let lines = lines(kind, inputs, outputs, &random.file_rows(kind, inputs, outputs));
        let weights = read(&lines, 0..outputs);
        let x = random.normals(5 * inputs);
        let found = product(&lines, &x, Instructions::best());
        let (mut error, mut size) = (0.0, 0.0);
        for (row, x) in x.chunks_exact(inputs).enumerate() {
            for (output, weights) in weights.chunks_exact(inputs).enumerate() {
                let products = weights.iter().zip(x).map(|(w, x)| f64::from(*w) * f64::from(*x));
                let expected: f64 = products.sum();
                error += (f64::from(found[row * outputs + output]) - expected).powi(2);
                size += expected.powi(2);
            }
        }
        // A row of unit normals is rounded to multiples of about 3/127.
        let relative = (error / size).sqrt();
        assert!(relative < 1e-2, "{kind:?}: {relative}");
    }
}

#[test]
fn selected_outputs_keep_their_bits() {
    let mut random = Random(4);
    for kind in KINDS {
        let lines = lines(kind, 512, 50, &random.file_rows(kind, 512, 50));
        let outputs = [49, 3, 3, 17, 0, 31, 32];
        let selected = lines.select_outputs(&outputs);
        let expected = read(&lines, outputs.iter().map(|output| *output as usize));
        assert_eq!(bits(&read(&selected, 0..outputs.len())), bits(&expected), "{kind:?}");
    }
}

#[test]
fn weights_take_at_most_a_tenth_more_than_in_a_file() {
    for kind in KINDS {
        let lines = QuantisedLines::zeros(kind, 512, 64);
        let file = 64 * 512 / kind.block_len() * kind.block_bytes();
        assert!(lines.num_bytes() * 10 <= file * 11, "{kind:?}: {} bytes", lines.num_bytes());
    }
}

#[test]
fn rows_that_are_not_finite_do_not_panic_or_disturb_others() {
    let mut random = Random(5);
    for kind in KINDS {
        let lines = lines(kind, 512, 20, &random.file_rows(kind, 512, 20));
        let values = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, f32::MAX, 1e-42, f32::MIN];
        for instructions in all_instructions() {
            let mut x = random.normals(7 * 512);
            let plain = product(&lines, &x, instructions);
            for (row, value) in values.into_iter().enumerate() {
                x[(row + 1) * 512 + 9 * row] = value;
            }
            let found = product(&lines, &x, instructions);
            assert_eq!(bits(&found[..20]), bits(&plain[..20]), "{kind:?}");
            assert!(found[20..4 * 20].iter().all(|value| !value.is_finite()), "{kind:?}");
            x[..512].fill(1e-42);
            assert!(product(&lines, &x[..512], instructions).iter().all(|value| value.is_finite()));
        }
    }
}

#[test]
fn extreme_scales_give_the_same_bits_with_all_instructions() {
    let mut random = Random(6);
    for half in [0x7c00, 0xfc00, 0x7bff, 0x0001, 0x83ff, 0x8000] {
        let mut raw = random.file_rows(QuantType::Q8_0, 32, 16);
        for block in raw.chunks_exact_mut(34) {
            block[..2].copy_from_slice(&u16::to_le_bytes(half));
        }
        let lines = lines(QuantType::Q8_0, 32, 16, &raw);
        let x = random.normals(32);
        for instructions in all_instructions() {
            let found = product(&lines, &x, instructions);
            assert_eq!(bits(&found), bits(&product(&lines, &x, Instructions::Portable(Portable))));
        }
    }
}
