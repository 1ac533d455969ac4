//! Running a chat template's source, which is a stranger's, so that it ends soon and stays small.
//!
//! The engine has no bound on what a program makes, and its operators cannot be replaced from
//! outside: `~`, `+`, `*`, slices and captures are instructions of their own, and some are computed
//! while compiling already. So the program is changed between parsing and compiling: every
//! expression that makes a value is wrapped in a filter, and every such operator replaced by one,
//! that keeps to the [`Allowance`]; text between tags becomes an expression too, since only
//! expressions pass the environment's formatter. For this the engine's `unstable_machinery` is
//! needed, and its version pinned.
//!
//! Before parsing, the source's own size is bounded: parser and compiler call themselves for each
//! operator of a chain.

use std::sync::Arc;

use minijinja::machinery::ast::{self, BinOpKind, Expr, Spanned, Stmt};
use minijinja::machinery::{CodeGenerator, Span, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Error, ErrorKind};

use super::allowance::Allowance;
use super::operations::{ADD, CONCATENATE, MULTIPLY, SETTLE, SLICE, STORE, environment};
use crate::caught::caught;

/// The name under which errors know the template.
const TEMPLATE_NAME: &str = "chat_template";
/// The longest published templates, with tools, have some 30,000.
const MOST_SOURCE_BYTES: usize = 256 << 10;
/// Words and signs between `{{` and `}}`. Parsing `1+1+…` takes the more stack the more there are.
const MOST_TAG_TOKENS: usize = 4096;
/// Each `elif` is parsed inside the one before.
const MOST_ELIFS: usize = 1024;
/// Enough for the deepest program within these bounds, several times over. Memory is taken as the
/// stack grows.
const STACK_BYTES: usize = 64 << 20;

/// Checks that the source is a program, and not larger than one may be.
pub(super) fn check(source: &str) -> Result<(), Error> {
    on_own_stack(|| {
        let program = Program::parse(source)?;
        let mut generator = CodeGenerator::new(TEMPLATE_NAME, source);
        generator.compile_stmt(&program.0);
        Ok(())
    })
}

/// The text that the program makes of its variables.
pub(super) fn run(source: &str, variables: Value, allowance: Allowance) -> Result<String, Error> {
    on_own_stack(|| {
        let allowance = Arc::new(allowance);
        let program = Program::parse(source)?;
        let mut generator = CodeGenerator::new(TEMPLATE_NAME, source);
        generator.compile_stmt(&program.0);
        let (instructions, blocks) = generator.finish();
        let environment = environment(&allowance);
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        eval(&environment, &instructions, variables, &blocks, &mut output, AutoEscape::None)?;
        Ok(text)
    })
}

/// Runs `job` on a thread whose size is known, whoever calls.
fn on_own_stack<T: Send>(job: impl FnOnce() -> Result<T, Error> + Send) -> Result<T, Error> {
    let failed = |what: &str| Error::new(ErrorKind::InvalidOperation, what.to_owned());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || {
                caught(job)
                    .unwrap_or_else(|said| Err(failed(&format!("its engine failed: {said}"))))
            })
            .map_err(|e| failed(&format!("no thread could be started for it: {e}")))?;
        thread.join().expect("its panics are caught")
    })
}

/// A program in which every value that is made is settled.
struct Program<'a>(Stmt<'a>);

impl<'a> Program<'a> {
    fn parse(source: &'a str) -> Result<Self, Error> {
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        check_size(source, syntax.clone())?;
        statement(&parse(source, TEMPLATE_NAME, syntax)?).map(Self)
    }
}

fn check_size(source: &str, syntax: SyntaxConfig) -> Result<(), Error> {
    let too_large = |what: String| Err(Error::new(ErrorKind::SyntaxError, what));
    if source.len() > MOST_SOURCE_BYTES {
        return too_large(format!(
            "it has {} bytes, at most {MOST_SOURCE_BYTES} may be",
            source.len()
        ));
    }
    let (mut num_tokens, mut num_elifs) = (0, 0);
    for token in tokenize(source, false, syntax) {
        let (token, span) = token?;
        match token {
            Token::VariableStart | Token::BlockStart => num_tokens = 0,
            Token::Ident("elif") => num_elifs += 1,
            _ => num_tokens += 1,
        }
        if num_tokens > MOST_TAG_TOKENS || num_elifs > MOST_ELIFS {
            let line = span.start_line;
            return too_large(format!(
                "more than {MOST_TAG_TOKENS} words in one tag, or {MOST_ELIFS} `elif` (line {line})"
            ));
        }
    }
    Ok(())
}

fn statements<'a>(statements: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>, Error> {
    statements.iter().map(statement).collect()
}

fn statement<'a>(stmt: &Stmt<'a>) -> Result<Stmt<'a>, Error> {
    Ok(match stmt {
        Stmt::Template(node) => {
            Stmt::Template(like(node, ast::Template { children: statements(&node.children)? }))
        }
        Stmt::EmitExpr(node) => emit(expression(&node.expr)?, node.span()),
        Stmt::EmitRaw(node) => emit(constant(Value::from(node.raw), node.span()), node.span()),
        Stmt::ForLoop(node) => {
            // Something is written in each turn, so that the clock is looked at.
            let mut body = vec![emit(constant(Value::from(""), node.span()), node.span())];
            body.extend(statements(&node.body)?);
            Stmt::ForLoop(like(
                node,
                ast::ForLoop {
                    target: target(&node.target),
                    iter: expression(&node.iter)?,
                    filter_expr: optional(node.filter_expr.as_ref())?,
                    recursive: node.recursive,
                    body,
                    else_body: statements(&node.else_body)?,
                },
            ))
        }
        Stmt::IfCond(node) => Stmt::IfCond(like(
            node,
            ast::IfCond {
                expr: expression(&node.expr)?,
                true_body: statements(&node.true_body)?,
                false_body: statements(&node.false_body)?,
            },
        )),
        Stmt::WithBlock(node) => {
            let assignments = node.assignments.iter();
            let assignments =
                assignments.map(|(name, value)| Ok((target(name), expression(value)?)));
            Stmt::WithBlock(like(
                node,
                ast::WithBlock {
                    assignments: assignments.collect::<Result<_, Error>>()?,
                    body: statements(&node.body)?,
                },
            ))
        }
        Stmt::Set(node) => Stmt::Set(like(
            node,
            ast::Set {
                target: target(&node.target),
                expr: stored(Some(expression(&node.expr)?), &node.target),
            },
        )),
        Stmt::SetBlock(node) => {
            let filter = optional(node.filter.as_ref())?;
            Stmt::SetBlock(like(
                node,
                ast::SetBlock {
                    target: target(&node.target),
                    filter: Some(stored(
                        Some(filter_of(SETTLE, filter, Vec::new(), node.span())),
                        &node.target,
                    )),
                    body: statements(&node.body)?,
                },
            ))
        }
        Stmt::FilterBlock(node) => Stmt::FilterBlock(like(
            node,
            ast::FilterBlock { filter: expression(&node.filter)?, body: statements(&node.body)? },
        )),
        Stmt::Block(node) => Stmt::Block(like(
            node,
            ast::Block { name: node.name, required: node.required, body: statements(&node.body)? },
        )),
        Stmt::Macro(node) => Stmt::Macro(macro_declaration(node)?),
        Stmt::CallBlock(node) => Stmt::CallBlock(like(
            node,
            ast::CallBlock {
                call: call(&node.call)?,
                macro_decl: macro_declaration(&node.macro_decl)?,
            },
        )),
        Stmt::Do(node) => Stmt::Do(like(node, ast::Do { call: call(&node.call)? })),
        Stmt::Continue(node) => Stmt::Continue(like(node, ast::Continue)),
        Stmt::Break(node) => Stmt::Break(like(node, ast::Break)),
        Stmt::AutoEscape(node) => return Err(unsupported("autoescape", node.span())),
        Stmt::Import(node) => return Err(unsupported("import", node.span())),
        Stmt::FromImport(node) => return Err(unsupported("import", node.span())),
        Stmt::Extends(node) => return Err(unsupported("extends", node.span())),
        Stmt::Include(node) => return Err(unsupported("include", node.span())),
    })
}

fn macro_declaration<'a>(node: &Spanned<ast::Macro<'a>>) -> Result<Spanned<ast::Macro<'a>>, Error> {
    Ok(like(
        node,
        ast::Macro {
            name: node.name,
            args: node.args.iter().map(target).collect(),
            defaults: node.defaults.iter().map(expression).collect::<Result<_, _>>()?,
            body: statements(&node.body)?,
        },
    ))
}

fn expression<'a>(expr: &Expr<'a>) -> Result<Expr<'a>, Error> {
    let span = expr.span();
    Ok(match expr {
        Expr::Var(node) => Expr::Var(like(node, ast::Var { id: node.id })),
        Expr::Const(node) => constant(node.value.clone(), span),
        Expr::Slice(node) => {
            let bound = |bound: &Option<Expr<'a>>| match bound {
                Some(bound) => expression(bound),
                None => Ok(constant(Value::from(()), span)),
            };
            let bounds = vec![bound(&node.start)?, bound(&node.stop)?, bound(&node.step)?];
            filter_of(SLICE, Some(expression(&node.expr)?), bounds, span)
        }
        Expr::UnaryOp(node) => {
            // The kind cannot be copied.
            let op = if matches!(node.op, ast::UnaryOpKind::Not) {
                ast::UnaryOpKind::Not
            } else {
                ast::UnaryOpKind::Neg
            };
            Expr::UnaryOp(like(node, ast::UnaryOp { op, expr: expression(&node.expr)? }))
        }
        Expr::BinOp(node) => {
            let (left, right) = (expression(&node.left)?, expression(&node.right)?);
            match node.op {
                BinOpKind::Add => filter_of(ADD, Some(left), vec![right], span),
                BinOpKind::Mul => filter_of(MULTIPLY, Some(left), vec![right], span),
                BinOpKind::Concat => filter_of(CONCATENATE, Some(left), vec![right], span),
                op => settled(Expr::BinOp(like(node, ast::BinOp { op, left, right })), span),
            }
        }
        Expr::Compare(node) => {
            let ops = node
                .ops
                .iter()
                .map(|op| Ok(ast::CompareOp { op: op.op, expr: expression(&op.expr)? }));
            let ops = ops.collect::<Result<_, Error>>()?;
            let compare = ast::Compare { expr: expression(&node.expr)?, ops };
            settled(Expr::Compare(like(node, compare)), span)
        }
        Expr::IfExpr(node) => Expr::IfExpr(like(
            node,
            ast::IfExpr {
                test_expr: expression(&node.test_expr)?,
                true_expr: expression(&node.true_expr)?,
                false_expr: optional(node.false_expr.as_ref())?,
            },
        )),
        Expr::Filter(node) => {
            let filter = ast::Filter {
                name: node.name,
                expr: optional(node.expr.as_ref())?,
                args: arguments(&node.args, span)?,
            };
            settled(Expr::Filter(like(node, filter)), span)
        }
        Expr::Test(node) => {
            let test = ast::Test {
                name: node.name,
                expr: expression(&node.expr)?,
                args: arguments(&node.args, span)?,
            };
            settled(Expr::Test(like(node, test)), span)
        }
        Expr::GetAttr(node) => {
            let attribute = ast::GetAttr { expr: expression(&node.expr)?, name: node.name };
            Expr::GetAttr(like(node, attribute))
        }
        Expr::GetItem(node) => {
            let (expr, subscript_expr) =
                (expression(&node.expr)?, expression(&node.subscript_expr)?);
            Expr::GetItem(like(node, ast::GetItem { expr, subscript_expr }))
        }
        Expr::Call(node) => settled(Expr::Call(call(node)?), span),
        Expr::List(node) => {
            settled(Expr::List(like(node, ast::List { items: expressions(&node.items)? })), span)
        }
        Expr::Tuple(node) => {
            settled(Expr::Tuple(like(node, ast::Tuple { items: expressions(&node.items)? })), span)
        }
        Expr::Map(node) => {
            let (keys, values) = (expressions(&node.keys)?, expressions(&node.values)?);
            settled(Expr::Map(like(node, ast::Map { keys, values })), span)
        }
    })
}

fn expressions<'a>(exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>, Error> {
    exprs.iter().map(expression).collect()
}

fn optional<'a>(expr: Option<&Expr<'a>>) -> Result<Option<Expr<'a>>, Error> {
    expr.map(expression).transpose()
}

/// What is called, with its arguments. The name called stays as it is: the compiler looks at it.
fn call<'a>(node: &Spanned<ast::Call<'a>>) -> Result<Spanned<ast::Call<'a>>, Error> {
    let args = arguments(&node.args, node.span())?;
    Ok(like(node, ast::Call { expr: expression(&node.expr)?, args }))
}

fn arguments<'a>(args: &[ast::CallArg<'a>], span: Span) -> Result<Vec<ast::CallArg<'a>>, Error> {
    let argument = |arg: &ast::CallArg<'a>| match arg {
        ast::CallArg::Pos(value) => Ok(ast::CallArg::Pos(expression(value)?)),
        ast::CallArg::Kwarg(name, value) => Ok(ast::CallArg::Kwarg(name, expression(value)?)),
        ast::CallArg::PosSplat(_) | ast::CallArg::KwargSplat(_) => Err(unsupported("*", span)),
    };
    args.iter().map(argument).collect()
}

/// The names that are assigned to, as they are.
fn target<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::Var(node) => Expr::Var(like(node, ast::Var { id: node.id })),
        Expr::GetAttr(node) => {
            Expr::GetAttr(like(node, ast::GetAttr { expr: target(&node.expr), name: node.name }))
        }
        Expr::List(node) => {
            Expr::List(like(node, ast::List { items: node.items.iter().map(target).collect() }))
        }
        _ => unreachable!("the parser makes targets of names, attributes and lists"),
    }
}

/// A value that is assigned to `assigned`: checked, where attributes of namespaces are among it.
fn stored<'a>(value: Option<Expr<'a>>, assigned: &Expr<'a>) -> Expr<'a> {
    let mut namespaces = Vec::new();
    find_namespaces(assigned, &mut namespaces);
    match value {
        Some(value) if namespaces.is_empty() => value,
        value => filter_of(STORE, value, namespaces, assigned.span()),
    }
}

fn find_namespaces<'a>(assigned: &Expr<'a>, namespaces: &mut Vec<Expr<'a>>) {
    match assigned {
        Expr::GetAttr(node) => namespaces.push(target(&node.expr)),
        Expr::List(node) => node.items.iter().for_each(|item| find_namespaces(item, namespaces)),
        _ => {}
    }
}

fn settled<'a>(expr: Expr<'a>, span: Span) -> Expr<'a> {
    filter_of(SETTLE, Some(expr), Vec::new(), span)
}

fn filter_of<'a>(
    name: &'static str,
    expr: Option<Expr<'a>>,
    args: Vec<Expr<'a>>,
    span: Span,
) -> Expr<'a> {
    let args = args.into_iter().map(ast::CallArg::Pos).collect();
    Expr::Filter(Spanned::new(ast::Filter { name, expr, args }, span))
}

fn constant(value: Value, span: Span) -> Expr<'static> {
    Expr::Const(Spanned::new(ast::Const { value }, span))
}

fn emit(expr: Expr<'_>, span: Span) -> Stmt<'_> {
    Stmt::EmitExpr(Spanned::new(ast::EmitExpr { expr }, span))
}

/// A node in the place of another.
fn like<T, U>(node: &Spanned<T>, with: U) -> Spanned<U> {
    Spanned::new(with, node.span())
}

fn unsupported(what: &str, span: Span) -> Error {
    let line = span.start_line;
    let problem = format!("`{what}` has no place in a chat template (line {line})");
    Error::new(ErrorKind::SyntaxError, problem)
}
