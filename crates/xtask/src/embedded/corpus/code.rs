//! Short Python functions, completed from a signature and a docstring.
//!
//! Names and layout are copied or fixed; the operators and constants come from the docstring's
//! words.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::words::pick;

/// Names for the members of a list and for one of them.
const NAMES: [(&str, &str); 20] = [
    ("prices", "price"),
    ("weights", "weight"),
    ("scores", "score"),
    ("sizes", "size"),
    ("heights", "height"),
    ("lengths", "length"),
    ("speeds", "speed"),
    ("widths", "width"),
    ("marks", "mark"),
    ("ages", "age"),
    ("depths", "depth"),
    ("levels", "level"),
    ("points", "point"),
    ("coins", "coin"),
    ("steps", "step"),
    ("values", "value"),
    ("numbers", "number"),
    ("areas", "area"),
    ("costs", "cost"),
    ("loads", "load"),
];

/// The words for a comparison in a docstring, and the operator.
const COMPARISONS: [(&str, &str); 6] = [
    ("above", ">"),
    ("below", "<"),
    ("at least", ">="),
    ("at most", "<="),
    ("equal to", "=="),
    ("different from", "!="),
];

/// Pairs of names for numbers.
const LABELS: [(&str, &str); 4] =
    [("high", "low"), ("good", "bad"), ("big", "small"), ("yes", "no")];

/// A function's prompt and answer. The lines of the body are already indented.
struct Function {
    name: String,
    parameter: &'static str,
    docstring: String,
    body: String,
}

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    let function = match rng.random_range(0..10) {
        0..=1 => steps(rng),
        2 => map(rng),
        3 => filter(rng),
        4 => count(rng),
        5 => total(rng),
        6 => label(rng),
        7 => limit(rng),
        8 => any(rng),
        _ => extreme(rng),
    };
    let Function { name, parameter, docstring, body } = function;
    let asked = pick(
        rng,
        &["Complete this function", "Finish this function", "Write this function in full"],
    );
    let signature = format!("def {name}({parameter}):");
    (format!("{asked}:\n{signature}\n    \"\"\"{docstring}\"\"\""), format!("{signature}\n{body}"))
}

fn constant(rng: &mut ChaCha8Rng) -> u32 {
    rng.random_range(2..100)
}

/// One to three operations on a number, one per line.
fn steps(rng: &mut ChaCha8Rng) -> Function {
    let (_, item) = pick(rng, &NAMES);
    let num_steps = rng.random_range(1..=3);
    let mut clauses = Vec::new();
    let mut body = String::new();
    for step in 0..num_steps {
        let object = if step == 0 { item } else { "it" };
        let number = constant(rng);
        let (clause, operator) = match rng.random_range(0..3) {
            0 => (format!("add {number} to {object}"), '+'),
            1 => (format!("subtract {number} from {object}"), '-'),
            _ => (format!("multiply {object} by {number}"), '*'),
        };
        clauses.push(clause);
        body += &format!("    {item} = {item} {operator} {number}\n");
    }
    let clauses = clauses.join(", then ");
    Function {
        name: format!("{}_{item}", pick(rng, &["change", "update", "adjust"])),
        parameter: item,
        docstring: format!("{}{}.", clauses[..1].to_uppercase(), &clauses[1..]),
        body: body + &format!("    return {item}"),
    }
}

fn map(rng: &mut ChaCha8Rng) -> Function {
    let (items, item) = pick(rng, &NAMES);
    let number = constant(rng);
    let (done, operator) =
        pick(rng, &[("multiplied by", '*'), ("increased by", '+'), ("reduced by", '-')]);
    Function {
        name: format!("{}_{items}", pick(rng, &["map", "convert", "rescale"])),
        parameter: items,
        docstring: format!("Return a list of the {items}, each {done} {number}."),
        body: format!(
            "    result = []
    for {item} in {items}:
        result.append({item} {operator} {number})
    return result"
        ),
    }
}

fn filter(rng: &mut ChaCha8Rng) -> Function {
    let (items, item) = pick(rng, &NAMES);
    let (comparison, operator) = pick(rng, &COMPARISONS);
    let number = constant(rng);
    Function {
        name: format!("{}_{items}", pick(rng, &["keep", "pick", "select"])),
        parameter: items,
        docstring: format!("Return a list of the {items} that are {comparison} {number}."),
        body: format!(
            "    result = []
    for {item} in {items}:
        if {item} {operator} {number}:
            result.append({item})
    return result"
        ),
    }
}

fn count(rng: &mut ChaCha8Rng) -> Function {
    let (items, item) = pick(rng, &NAMES);
    let (comparison, operator) = pick(rng, &COMPARISONS);
    let number = constant(rng);
    Function {
        name: format!("count_{items}"),
        parameter: items,
        docstring: format!("Count the {items} that are {comparison} {number}."),
        body: format!(
            "    total = 0
    for {item} in {items}:
        if {item} {operator} {number}:
            total = total + 1
    return total"
        ),
    }
}

fn total(rng: &mut ChaCha8Rng) -> Function {
    let (items, item) = pick(rng, &NAMES);
    let (comparison, operator) = pick(rng, &COMPARISONS);
    let number = constant(rng);
    Function {
        name: format!("{}_{items}", pick(rng, &["sum", "total", "add"])),
        parameter: items,
        docstring: format!("Add up the {items} that are {comparison} {number}."),
        body: format!(
            "    total = 0
    for {item} in {items}:
        if {item} {operator} {number}:
            total = total + {item}
    return total"
        ),
    }
}

fn label(rng: &mut ChaCha8Rng) -> Function {
    let (_, item) = pick(rng, &NAMES);
    let (comparison, operator) = pick(rng, &COMPARISONS);
    let number = constant(rng);
    let (first, second) = pick(rng, &LABELS);
    let (met, unmet) = if rng.random() { (first, second) } else { (second, first) };
    Function {
        name: format!("{}_{item}", pick(rng, &["label", "name", "judge"])),
        parameter: item,
        docstring: format!(
            "Return '{met}' if {item} is {comparison} {number}, otherwise '{unmet}'."
        ),
        body: format!(
            "    if {item} {operator} {number}:
        return '{met}'
    return '{unmet}'"
        ),
    }
}

fn limit(rng: &mut ChaCha8Rng) -> Function {
    let (_, item) = pick(rng, &NAMES);
    let low = rng.random_range(2..50);
    let high = rng.random_range(50..100);
    Function {
        name: format!("{}_{item}", pick(rng, &["limit", "clamp", "bound"])),
        parameter: item,
        docstring: format!("Keep {item} between {low} and {high}."),
        body: format!(
            "    if {item} < {low}:
        return {low}
    if {item} > {high}:
        return {high}
    return {item}"
        ),
    }
}

/// Whether any member satisfies a comparison.
fn any(rng: &mut ChaCha8Rng) -> Function {
    let (items, item) = pick(rng, &NAMES);
    let (comparison, operator) = pick(rng, &COMPARISONS);
    let number = constant(rng);
    let prefix = pick(rng, &["has", "any"]);
    Function {
        name: format!("{prefix}_{item}"),
        parameter: items,
        docstring: format!("Tell whether any {item} is {comparison} {number}."),
        body: format!(
            "    for {item} in {items}:
        if {item} {operator} {number}:
            return True
    return False"
        ),
    }
}

fn extreme(rng: &mut ChaCha8Rng) -> Function {
    let (items, item) = pick(rng, &NAMES);
    let (which, operator) = pick(rng, &[("largest", '>'), ("smallest", '<')]);
    let number = constant(rng);
    Function {
        name: format!("{which}_{item}"),
        parameter: items,
        docstring: format!("Return the {which} of the {items}, plus {number}."),
        body: format!(
            "    best = {items}[0]
    for {item} in {items}:
        if {item} {operator} best:
            best = {item}
    return best + {number}"
        ),
    }
}
