//! Ridge regression with many outputs: the linear map from one set of vectors to another with the
//! least squared error plus a penalty on the map's size.

/// Solves (G + s·ḡ·1)·W = C for W, where s is `strength` and ḡ is the mean of G's diagonal. With
/// the Gram matrix G = XᵀX and C = XᵀY this is ridge regression of Y on X, and s does not depend on
/// the number of rows or their scale. None if the matrix is not positive definite, for example
/// without rows.
///
/// # Shapes
/// `gram` is `[size, size]`; `cross` and the result are `[size, outputs]`, in row-major order.
///
/// # Panics
/// If a length does not match.
pub fn ridge(gram: &[f64], cross: &[f64], size: usize, strength: f64) -> Option<Vec<f64>> {
    assert_eq!(gram.len(), size * size, "a square matrix");
    assert!(size > 0 && cross.len().is_multiple_of(size), "a row of each input");
    let mean = (0..size).map(|i| gram[i * size + i]).sum::<f64>() / size as f64;
    let mut penalised = gram.to_vec();
    (0..size).for_each(|i| penalised[i * size + i] += strength * mean);
    let lower = cholesky(penalised, size)?;
    Some(solve(&lower, size, cross.to_vec()))
}

/// Factorises a symmetric positive definite matrix into L·Lᵀ and returns L, in row-major order;
/// entries right of the diagonal are not meaningful. None if the matrix is not positive definite.
fn cholesky(mut matrix: Vec<f64>, size: usize) -> Option<Vec<f64>> {
    for i in 0..size {
        let (above, rest) = matrix.split_at_mut(i * size);
        let row = &mut rest[..size];
        for j in 0..i {
            let other = &above[j * size..][..j + 1];
            row[j] = (row[j] - dot(&row[..j], &other[..j])) / other[j];
        }
        let square = row[i] - dot(&row[..i], &row[..i]);
        // NaN fails this too.
        if !(square > 0.0 && square.is_finite()) {
            return None;
        }
        row[i] = square.sqrt();
    }
    Some(matrix)
}

/// Solves L·Lᵀ·X = B in place.
fn solve(lower: &[f64], size: usize, mut b: Vec<f64>) -> Vec<f64> {
    let outputs = b.len() / size;
    let at = |i: usize, k: usize| lower[i * size + k];
    for i in 0..size {
        let (above, rest) = b.split_at_mut(i * outputs);
        let row = &mut rest[..outputs];
        for k in 0..i {
            subtract(row, at(i, k), &above[k * outputs..][..outputs]);
        }
        row.iter_mut().for_each(|value| *value /= at(i, i));
    }
    for i in (0..size).rev() {
        let (upper, below) = b.split_at_mut((i + 1) * outputs);
        let row = &mut upper[i * outputs..];
        for k in i + 1..size {
            subtract(row, at(k, i), &below[(k - i - 1) * outputs..][..outputs]);
        }
        row.iter_mut().for_each(|value| *value /= at(i, i));
    }
    b
}

fn subtract(row: &mut [f64], times: f64, other: &[f64]) {
    row.iter_mut().zip(other).for_each(|(value, other)| *value -= times * other);
}

/// Computes the dot product in eight lanes, so that it vectorises.
fn dot(one: &[f64], other: &[f64]) -> f64 {
    let (ones, rest) = one.as_chunks::<8>();
    let (others, other_rest) = other.as_chunks::<8>();
    let mut lanes = [0.0; 8];
    for (one, other) in ones.iter().zip(others) {
        for lane in 0..8 {
            lanes[lane] += one[lane] * other[lane];
        }
    }
    let rest: f64 = rest.iter().zip(other_rest).map(|(a, b)| a * b).sum();
    lanes.iter().sum::<f64>() + rest
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SeededDraws;

    fn product(a: &[f64], b: &[f64], inner: usize) -> Vec<f64> {
        let (rows, columns) = (a.len() / inner, b.len() / inner);
        let cell = |at: usize| {
            let (row, column) = (at / columns, at % columns);
            (0..inner).map(|k| a[row * inner + k] * b[k * columns + column]).sum()
        };
        (0..rows * columns).map(cell).collect()
    }

    fn transposed(a: &[f64], columns: usize) -> Vec<f64> {
        let rows = a.len() / columns;
        (0..a.len()).map(|at| a[at % rows * columns + at / rows]).collect()
    }

    #[test]
    fn a_linear_map_is_recovered_and_shrinks_with_the_strength() {
        let (rows, size, outputs) = (60, 11, 3);
        let mut draws = SeededDraws::new(3, &["ridge"]);
        let mut numbers =
            |len: usize| -> Vec<f64> { (0..len).map(|_| 2.0 * draws.uniform() - 1.0).collect() };
        let (x, map) = (numbers(rows * size), numbers(size * outputs));
        let transposed = transposed(&x, size);
        let gram = product(&transposed, &x, rows);
        let cross = product(&transposed, &product(&x, &map, size), rows);
        let found = ridge(&gram, &cross, size, 0.0).expect("more rows than inputs");
        assert!(found.iter().zip(&map).all(|(one, other)| (one - other).abs() < 1e-9));
        let size_of = |map: &[f64]| map.iter().map(|value| value * value).sum::<f64>();
        let sizes = [0.0, 0.1, 1.0, 1e9].map(|strength| {
            size_of(&ridge(&gram, &cross, size, strength).expect("positive definite"))
        });
        assert!(sizes.is_sorted_by(|one, next| one > next) && sizes[3] < 1e-12, "{sizes:?}");
        // The result satisfies the equation.
        let strength = 0.5;
        let found = ridge(&gram, &cross, size, strength).expect("positive definite");
        let mean = (0..size).map(|i| gram[i * size + i]).sum::<f64>() / size as f64;
        let left = product(&gram, &found, size);
        for ((left, found), right) in left.iter().zip(&found).zip(&cross) {
            assert!((left + strength * mean * found - right).abs() < 1e-9);
        }
    }

    #[test]
    fn no_rows_give_no_map() {
        assert_eq!(ridge(&[0.0; 4], &[0.0; 2], 2, 1.0), None);
        assert_eq!(ridge(&[f64::NAN, 0.0, 0.0, 1.0], &[0.0; 2], 2, 1.0), None);
    }
}
