//! Least squares over a few columns, with no answer if the columns are nearly linearly dependent.

/// The minimum sine of the angle between a column and the span of the others. Below it the
/// coefficients are meaningless. Runs at one fixed candidate length stay below it, even though
/// their last rounds may be cut short.
const MIN_SINE: f64 = 0.02;

/// Solves least squares over the columns with indices in `subset`. Returns the coefficients of all
/// columns, which are 0 outside `subset`, and the squared error. None if a column is nearly a
/// linear combination of the others.
///
/// Modified Gram-Schmidt on unit columns with the target as an extra column is as accurate as an
/// orthogonal factorisation; normal equations would square the condition number.
pub(crate) fn least_squares<const N: usize>(
    columns: &[Vec<f64>; N],
    subset: &[usize],
    target: &[f64],
) -> Option<([f64; N], f64)> {
    let mut basis: Vec<Vec<f64>> = Vec::with_capacity(subset.len());
    let mut triangle = [[0.0; N]; N];
    for (place, &column) in subset.iter().enumerate() {
        let mut rest = columns[column].clone();
        let norm = dot(&rest, &rest).sqrt();
        for (row, unit) in basis.iter().enumerate() {
            triangle[row][place] = project_out(&mut rest, unit);
        }
        let length = dot(&rest, &rest).sqrt();
        if norm == 0.0 || length < MIN_SINE * norm {
            return None;
        }
        rest.iter_mut().for_each(|value| *value /= length);
        triangle[place][place] = length;
        basis.push(rest);
    }
    let mut residual = target.to_vec();
    let mut coefficients = [0.0; N];
    let loadings: Vec<f64> = basis.iter().map(|unit| project_out(&mut residual, unit)).collect();
    for place in (0..subset.len()).rev() {
        let known: f64 = (place + 1..subset.len())
            .map(|later| triangle[place][later] * coefficients[subset[later]])
            .sum();
        coefficients[subset[place]] = (loadings[place] - known) / triangle[place][place];
    }
    Some((coefficients, dot(&residual, &residual)))
}

/// Finds the non-negative coefficients with the least squared error. Columns whose index is not in
/// `allowed` get 0. None if `allowed` is empty or one of its columns is nearly a linear combination
/// of the others.
pub(crate) fn non_negative_least_squares<const N: usize>(
    columns: &[Vec<f64>; N],
    allowed: &[usize],
    target: &[f64],
) -> Option<[f64; N]> {
    least_squares(columns, allowed, target)?;
    // The non-negative optimum is the unconstrained optimum over the columns that it uses.
    let subsets = (1_u32..1 << allowed.len()).map(|chosen| -> Vec<usize> {
        let is_chosen = |place: &usize| chosen & (1 << place) != 0;
        (0..allowed.len()).filter(is_chosen).map(|place| allowed[place]).collect()
    });
    subsets
        .filter_map(|subset| least_squares(columns, &subset, target))
        .filter(|(coefficients, _)| coefficients.iter().all(|coefficient| *coefficient >= 0.0))
        .min_by(|(_, error), (_, other)| error.total_cmp(other))
        .map(|(coefficients, _)| coefficients)
}

/// Subtracts from `vector` its component along `unit` and returns the component's length.
fn project_out(vector: &mut [f64], unit: &[f64]) -> f64 {
    let length = dot(vector, unit);
    vector.iter_mut().zip(unit).for_each(|(value, unit)| *value -= length * unit);
    length
}

pub(crate) fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn columns() -> [Vec<f64>; 3] {
        [vec![1.0, 1.0, 1.0, 1.0], vec![0.0, 1.0, 2.0, 3.0], vec![1.0, 3.0, 5.0, 7.0]]
    }

    #[test]
    fn a_line_fit_matches_hand_computation() {
        // The best line through (0, 0), (1, 1), (2, 1), (3, 2) is 0.1 + 0.6·x, with squared error
        // 0.2.
        let (coefficients, error) =
            least_squares(&columns(), &[0, 1], &[0.0, 1.0, 1.0, 2.0]).expect("independent columns");
        // A handful of f64 operations on numbers of order one.
        assert!((coefficients[0] - 0.1).abs() < 1e-14 && (coefficients[1] - 0.6).abs() < 1e-14);
        assert_eq!(coefficients[2], 0.0);
        assert!((error - 0.2).abs() < 1e-14);
    }

    #[test]
    fn the_residual_is_orthogonal_to_the_columns() {
        let target = [3.0, -1.0, 4.0, 1.0];
        let (coefficients, error) =
            least_squares(&columns(), &[0, 2], &target).expect("independent columns");
        let [ones, _, third] = &columns();
        let residual: Vec<f64> = (0..4)
            .map(|i| target[i] - coefficients[0] * ones[i] - coefficients[2] * third[i])
            .collect();
        assert!(dot(&residual, ones).abs() < 1e-13 && dot(&residual, third).abs() < 1e-13);
        assert!((dot(&residual, &residual) - error).abs() < 1e-13);
    }

    #[test]
    fn dependent_columns_give_no_answer() {
        // The third column is the first and twice the second.
        assert_eq!(least_squares(&columns(), &[0, 1, 2], &[1.0; 4]), None);
        let zero = [vec![0.0; 4], vec![1.0; 4], vec![2.0; 4]];
        assert_eq!(least_squares(&zero, &[0], &[1.0; 4]), None);
        assert_eq!(least_squares(&zero, &[1, 2], &[1.0; 4]), None);
    }
}
