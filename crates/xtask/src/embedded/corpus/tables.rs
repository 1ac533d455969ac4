//! A small markdown table and one look-up in it, answered in full sentences.
//!
//! The hard token is the value, which is found by a row and a column.

use rand::RngExt;
use rand_chacha::ChaCha8Rng;

use super::words::{ANIMALS, COLOURS, FOODS, OBJECTS, pick, pick_distinct};

/// A column after the first: its name, and the values that it draws from.
#[derive(Clone, Copy, PartialEq)]
enum Column {
    Colour,
    Price,
    Weight,
    Height,
    Shelf,
    Code,
}

impl Column {
    fn name(self) -> &'static str {
        match self {
            Column::Colour => "colour",
            Column::Price => "price",
            Column::Weight => "weight",
            Column::Height => "height",
            Column::Shelf => "shelf",
            Column::Code => "code",
        }
    }

    fn is_number(self) -> bool {
        matches!(self, Column::Price | Column::Weight | Column::Height)
    }

    /// Distinct values for `num_rows` rows.
    fn draw_values(self, rng: &mut ChaCha8Rng, num_rows: usize) -> Vec<String> {
        const LETTERS: [char; 8] = ['A', 'B', 'C', 'D', 'E', 'F', 'G', 'H'];
        match self {
            Column::Colour => strings(pick_distinct(rng, &COLOURS, num_rows)),
            Column::Shelf => strings(pick_distinct(rng, &LETTERS, num_rows)),
            Column::Code => pick_distinct(rng, &LETTERS, num_rows)
                .into_iter()
                .map(|letter| format!("{letter}{}", rng.random_range(10..100)))
                .collect(),
            Column::Price | Column::Weight | Column::Height => {
                let numbers: Vec<u32> = (2..100).collect();
                strings(pick_distinct(rng, &numbers, num_rows))
            }
        }
    }
}

fn strings<T: ToString>(values: Vec<T>) -> Vec<String> {
    values.iter().map(T::to_string).collect()
}

/// The subject of a table: the name of its first column, the entries of that column, and other columns that
/// fit.
const SUBJECTS: [(&str, &[&str], &[Column]); 3] = [
    (
        "item",
        &OBJECTS,
        &[
            Column::Colour,
            Column::Price,
            Column::Weight,
            Column::Height,
            Column::Shelf,
            Column::Code,
        ],
    ),
    ("food", &FOODS, &[Column::Price, Column::Weight, Column::Shelf, Column::Code]),
    ("animal", &ANIMALS, &[Column::Colour, Column::Weight, Column::Height, Column::Code]),
];

/// A table of three columns, the first with the subject's names.
struct Table {
    subject: &'static str,
    columns: Vec<Column>,
    keys: Vec<&'static str>,
    /// Values by column, then row.
    cells: Vec<Vec<String>>,
}

impl Table {
    fn draw(rng: &mut ChaCha8Rng) -> Self {
        let (subject, names, columns) = pick(rng, &SUBJECTS);
        let num_rows = rng.random_range(3..=4);
        let keys = pick_distinct(rng, names, num_rows);
        let columns = pick_distinct(rng, columns, 2);
        let cells = columns.iter().map(|column| column.draw_values(rng, num_rows)).collect();
        Table { subject, columns, keys, cells }
    }

    fn row(&self, row: usize) -> String {
        format!("| {} | {} | {} |", self.keys[row], self.cells[0][row], self.cells[1][row])
    }

    fn markdown(&self) -> String {
        let rows: Vec<_> = (0..self.keys.len()).map(|row| self.row(row)).collect();
        format!(
            "| {} | {} | {} |\n|---|---|---|\n{}",
            self.subject,
            self.columns[0].name(),
            self.columns[1].name(),
            rows.join("\n")
        )
    }

    /// The positions of `count` different rows, in random order.
    fn draw_rows(&self, rng: &mut ChaCha8Rng, count: usize) -> Vec<usize> {
        let rows: Vec<_> = (0..self.keys.len()).collect();
        pick_distinct(rng, &rows, count)
    }
}

pub(super) fn draw(rng: &mut ChaCha8Rng) -> (String, String) {
    let table = Table::draw(rng);
    let number_column = table.columns.iter().position(|column| column.is_number());
    let (question, answer) = match (rng.random_range(0..6), number_column) {
        (0, Some(column)) => greatest(&table, column),
        (0..=1, _) => look_up(rng, &table),
        (2..=3, _) => look_up_two(rng, &table),
        _ => find(rng, &table),
    };
    (format!("{}\n{question}", table.markdown()), answer)
}

/// Asks for a value by its row's name.
fn look_up(rng: &mut ChaCha8Rng, table: &Table) -> (String, String) {
    let row = table.draw_rows(rng, 1)[0];
    let column = rng.random_range(0..table.columns.len());
    let (key, name) = (table.keys[row], table.columns[column].name());
    let question = match rng.random_range(0..3) {
        0 => format!("What is the {name} of the {key}?"),
        1 => format!("Look up the {name} of the {key}."),
        _ => format!("Which {name} does the {key} have?"),
    };
    let answer = format!(
        "The row of the {key} is {}. The {name} of the {key} is {}.",
        table.row(row),
        table.cells[column][row]
    );
    (question, answer)
}

/// Asks for the values of two rows in one column.
fn look_up_two(rng: &mut ChaCha8Rng, table: &Table) -> (String, String) {
    let rows = table.draw_rows(rng, 2);
    let column = rng.random_range(0..table.columns.len());
    let name = table.columns[column].name();
    let [first, second] = [table.keys[rows[0]], table.keys[rows[1]]];
    let question = match rng.random_range(0..2) {
        0 => format!("What is the {name} of the {first}, and of the {second}?"),
        _ => format!("Look up the {name} of the {first} and of the {second}."),
    };
    let answer = format!(
        "The row of the {first} is {}. The row of the {second} is {}. \
         The {name} of the {first} is {} and the {name} of the {second} is {}.",
        table.row(rows[0]),
        table.row(rows[1]),
        table.cells[column][rows[0]],
        table.cells[column][rows[1]],
    );
    (question, answer)
}

/// Asks for a row's name by one of its values.
fn find(rng: &mut ChaCha8Rng, table: &Table) -> (String, String) {
    let row = table.draw_rows(rng, 1)[0];
    let column = rng.random_range(0..table.columns.len());
    let (subject, name) = (table.subject, table.columns[column].name());
    let value = &table.cells[column][row];
    let question = match rng.random_range(0..2) {
        0 => format!("Which {subject} has the {name} {value}?"),
        _ => format!("Find the {subject} with the {name} {value}."),
    };
    let answer = format!(
        "The row with the {name} {value} is {}. The {subject} with the {name} {value} is the {}.",
        table.row(row),
        table.keys[row]
    );
    (question, answer)
}

/// Asks for the row with the largest number in `column`.
fn greatest(table: &Table, column: usize) -> (String, String) {
    let (subject, name) = (table.subject, table.columns[column].name());
    let values = &table.cells[column];
    let (key, value) = table
        .keys
        .iter()
        .zip(values)
        .max_by_key(|(_, value)| value.parse::<u32>().expect("the column holds numbers"))
        .expect("a table has rows");
    let answer = format!(
        "Each {name} in order: {}. The greatest {name} is {value}. \
         The {subject} with the greatest {name} is the {key}.",
        values.join(", ")
    );
    (format!("Which {subject} has the greatest {name}?"), answer)
}
