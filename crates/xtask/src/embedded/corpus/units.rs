//! Conversion between two units: the factor, then the multiplication or division, then the remainder.
//!
//! Powers of ten only shift digits and are easy; products with 60, 24 or 7 have to be learned.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::words::{pick, pick_distinct};

/// A unit's singular and plural.
#[derive(Clone, Copy)]
struct Unit {
    one: &'static str,
    many: &'static str,
}

#[derive(Clone, Copy)]
enum Quantity {
    Length,
    Weight,
    Volume,
    Time,
}

/// One large unit is `factor` small ones. Amounts are 2 to `max_amount` large units.
#[derive(Clone, Copy)]
struct Conversion {
    quantity: Quantity,
    large: Unit,
    small: Unit,
    factor: u32,
    max_amount: u32,
}

const CONVERSIONS: [Conversion; 12] = [
    conversion(Quantity::Length, "km", "m", 1000, 999),
    conversion(Quantity::Length, "m", "cm", 100, 999),
    conversion(Quantity::Length, "cm", "mm", 10, 999),
    conversion(Quantity::Length, "m", "mm", 1000, 999),
    conversion(Quantity::Weight, "kg", "g", 1000, 999),
    conversion(Quantity::Weight, "t", "kg", 1000, 999),
    conversion(Quantity::Volume, "l", "ml", 1000, 999),
    conversion(Quantity::Time, "h", "min", 60, 20),
    conversion(Quantity::Time, "min", "s", 60, 20),
    Conversion {
        large: Unit { one: "day", many: "days" },
        ..conversion(Quantity::Time, "day", "h", 24, 15)
    },
    Conversion {
        large: Unit { one: "week", many: "weeks" },
        small: Unit { one: "day", many: "days" },
        ..conversion(Quantity::Time, "week", "days", 7, 20)
    },
    Conversion {
        large: Unit { one: "year", many: "years" },
        small: Unit { one: "month", many: "months" },
        ..conversion(Quantity::Time, "year", "months", 12, 20)
    },
];

/// A conversion between unit symbols, which have no plural.
const fn conversion(
    quantity: Quantity,
    large: &'static str,
    small: &'static str,
    factor: u32,
    max_amount: u32,
) -> Conversion {
    Conversion {
        quantity,
        large: Unit { one: large, many: large },
        small: Unit { one: small, many: small },
        factor,
        max_amount,
    }
}

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    let conversion = pick(rng, &CONVERSIONS);
    let (prompt, worked) = match rng.random_range(0..6) {
        0 => backwards(rng, conversion),
        1 => with_left_over(rng, conversion),
        2 => forwards(rng, conversion),
        _ => two_things(rng, conversion),
    };
    let Conversion { large, small, factor, .. } = conversion;
    (prompt, format!("1 {} is {factor} {}. {worked}", large.one, small.many))
}

/// Converts small units to large ones.
fn backwards(rng: &mut ChaCha8Rng, conversion: Conversion) -> (String, String) {
    let Conversion { large, small, factor, .. } = conversion;
    let amount = conversion.draw_amount(rng);
    let product = amount * factor;
    let worked = format!(
        "{product} {} is {product} / {factor} {large} = {amount} {large}.",
        small.many,
        large = large.many
    );
    (ask(rng, conversion, &measure(product, small), large), worked)
}

/// Converts large and small units to small ones.
fn with_left_over(rng: &mut ChaCha8Rng, conversion: Conversion) -> (String, String) {
    let Conversion { large, small, factor, .. } = conversion;
    let amount = conversion.draw_amount(rng);
    let left_over = rng.random_range(1..factor);
    let asked = format!("{} {}", measure(amount, large), measure(left_over, small));
    let worked = format!(
        "{} {} + {} = {}.",
        conversion.multiplied(amount),
        measure(amount * factor, small),
        measure(left_over, small),
        measure(amount * factor + left_over, small)
    );
    (ask(rng, conversion, &asked, small), worked)
}

/// Converts large units to small ones.
fn forwards(rng: &mut ChaCha8Rng, conversion: Conversion) -> (String, String) {
    let amount = conversion.draw_amount(rng);
    let prompt = ask(rng, conversion, &measure(amount, conversion.large), conversion.small);
    (prompt, conversion.multiplied(amount))
}

/// The same conversion of two amounts.
fn two_things(rng: &mut ChaCha8Rng, conversion: Conversion) -> (String, String) {
    let Conversion { quantity, large, small, .. } = conversion;
    let things = pick_distinct(rng, quantity.things(), 2);
    let amounts = [conversion.draw_amount(rng), conversion.draw_amount(rng)];
    let measured = amounts.map(|amount| measure(amount, large));
    let prompt = format!(
        "The {} of the {} is {} and that of the {} is {}. Give both in {}.",
        quantity.name(),
        things[0],
        measured[0],
        things[1],
        measured[1],
        small.many
    );
    let [first, second] = [0, 1].map(|index| {
        let multiplied = conversion.multiplied(amounts[index]);
        format!("For the {}, {multiplied}", things[index])
    });
    (prompt, format!("{first} {second}"))
}

/// A question for `asked` in the unit `wanted`, with or without a thing that it measures.
fn ask(rng: &mut ChaCha8Rng, conversion: Conversion, asked: &str, wanted: Unit) -> String {
    let wanted = wanted.many;
    match rng.random_range(0..4) {
        0 => format!("Convert {asked} to {wanted}."),
        1 => format!("Write {asked} in {wanted}."),
        _ => {
            let name = conversion.quantity.name();
            let thing = pick(rng, conversion.quantity.things());
            format!("The {name} of the {thing} is {asked}. Give it in {wanted}.")
        }
    }
}

impl Conversion {
    fn draw_amount(self, rng: &mut ChaCha8Rng) -> u32 {
        rng.random_range(2..=self.max_amount)
    }

    /// The sentence that turns `amount` large units into small ones.
    fn multiplied(self, amount: u32) -> String {
        let Conversion { large, small, factor, .. } = self;
        format!(
            "{amount} {} is {amount} x {factor} {small} = {} {small}.",
            large.many,
            amount * factor,
            small = small.many
        )
    }
}

impl Quantity {
    fn name(self) -> &'static str {
        match self {
            Quantity::Length => "length",
            Quantity::Weight => "weight",
            Quantity::Volume => "volume",
            Quantity::Time => "duration",
        }
    }

    /// Things that this quantity measures.
    fn things(self) -> &'static [&'static str] {
        match self {
            Quantity::Length => {
                &["rope", "road", "wall", "ribbon", "bridge", "river", "net", "ladder"]
            }
            Quantity::Weight => {
                &["basket", "stone", "barrel", "box", "bell", "anchor", "hammer", "wheel"]
            }
            Quantity::Volume => {
                &["bucket", "bottle", "kettle", "jar", "pot", "barrel", "bowl", "vase"]
            }
            Quantity::Time => &["trip", "work", "course", "repair", "lease", "trial"],
        }
    }
}

fn measure(amount: u32, unit: Unit) -> String {
    let unit = if amount == 1 { unit.one } else { unit.many };
    format!("{amount} {unit}")
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng;

    use super::*;

    /// The number at the end of `text`, before its unit.
    fn last_number(text: &str) -> u32 {
        let number = text.split(|c: char| !c.is_ascii_digit()).rfind(|number| !number.is_empty());
        number.unwrap().parse().unwrap()
    }

    #[test]
    fn both_sides_of_every_equals_sign_agree() {
        let rng = &mut ChaCha8Rng::seed_from_u64(5);
        for _ in 0..500 {
            let (_, answer) = draw(rng);
            for clause in answer.split(". ").filter(|clause| clause.contains('=')) {
                let (left, right) = clause.split_once(" = ").unwrap();
                let left = left.split(" is ").last().unwrap();
                let value = if let Some((a, b)) = left.split_once(" x ") {
                    last_number(a) * last_number(b)
                } else if let Some((a, b)) = left.split_once(" / ") {
                    assert_eq!(last_number(a) % last_number(b), 0);
                    last_number(a) / last_number(b)
                } else {
                    let (a, b) = left.split_once(" + ").unwrap();
                    last_number(a) + last_number(b)
                };
                assert_eq!(value, last_number(right), "{answer}");
            }
        }
    }
}
