//! The interpreter of a chat template, an untrusted program that runs within an [`Allowance`].
//!
//! The engine (minijinja) does not bound the size of values. Its operators `~`, `+`, `*`, slices
//! and captures cannot be replaced from outside, because they are separate instructions, and some
//! are evaluated while compiling. So the program is rewritten between parsing and compiling: every
//! expression that makes a value is wrapped in a filter that charges the allowance, and these
//! operators are replaced by such filters. Text between tags becomes an expression too, because
//! only expressions pass the environment's formatter. This needs the engine's `unstable_machinery`
//! and a pinned version.
//!
//! The source's size is limited first, because parser and compiler recurse once per operator.

use std::sync::Arc;

use chrono::NaiveDateTime;
use minijinja::machinery::ast::{self, BinOpKind, Expr, Spanned, Stmt, UnaryOpKind};
use minijinja::machinery::{CodeGenerator, Span, Token, eval, make_string_output, parse, tokenize};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::Value;
use minijinja::{AutoEscape, Error, ErrorKind};

use super::allowance::Allowance;
use super::methods::is_method;
use super::operations::{
    ADD, ATTRIBUTE, CHAIN, CONCATENATE, ITEM, MULTIPLY, REMAINDER, SETTLE, SLICE, STORE,
    environment,
};
use super::printed::Result;
use crate::caught::caught;

/// The template's name in the engine's errors.
const TEMPLATE_NAME: &str = "chat_template";
/// The maximum size of a template's source in bytes. The longest published templates, which support
/// tools, have some 30,000.
const MAX_SOURCE_BYTES: usize = 256 << 10;
/// The largest number of tokens between `{{` and `}}`. Parsing `1+1+…` recurses once per operator.
const MAX_TAG_TOKENS: usize = 4096;
/// The largest number of `elif` in a template. Each one is parsed inside the previous one.
const MAX_ELIFS: usize = 1024;
/// The signs of the operators in a chain as `1 < a < 3`, in the order of `CompareOpKind`.
const SIGNS: [&str; 8] = ["==", "!=", "<", "<=", ">", ">=", "in", "not in"];
/// The size of the stack on which a template runs, several times the need of the deepest program
/// within these limits. Memory is committed only as the stack grows.
const STACK_BYTES: usize = 64 << 20;

/// Checks that the source parses and is within the limits.
pub(super) fn check(source: &str) -> Result<()> {
    on_own_stack(|| {
        let program = parse_program(source)?;
        CodeGenerator::new(TEMPLATE_NAME, source).compile_stmt(&program);
        Ok(())
    })
}

/// Runs the program with these variables and returns its text. `date` is today for the program.
pub(super) fn run(
    source: &str,
    variables: Value,
    allowance: Allowance,
    date: NaiveDateTime,
) -> Result<String> {
    on_own_stack(|| {
        let environment = environment(&Arc::new(allowance), date);
        let program = parse_program(source)?;
        let mut generator = CodeGenerator::new(TEMPLATE_NAME, source);
        generator.compile_stmt(&program);
        let (instructions, blocks) = generator.finish();
        let mut text = String::new();
        let mut output = make_string_output(&mut text);
        eval(&environment, &instructions, variables, &blocks, &mut output, AutoEscape::None)?;
        Ok(text)
    })
}

/// Runs `job` on a thread with a stack of known size.
fn on_own_stack<T: Send>(job: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let failed = |what: &str| Error::new(ErrorKind::InvalidOperation, what.to_owned());
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new()
            .name("chat template".to_owned())
            .stack_size(STACK_BYTES)
            .spawn_scoped(scope, || {
                caught(job).unwrap_or_else(|said| {
                    Err(failed(&format!("the template engine failed: {said}")))
                })
            })
            .map_err(|e| failed(&format!("cannot start a thread for the template: {e}")))?;
        thread.join().expect("its panics are caught")
    })
}

/// Parses a program and rewrites it so that every value it makes is charged to the allowance.
fn parse_program(source: &str) -> Result<Stmt<'_>> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
    check_size(source, syntax.clone())?;
    statement(&parse(source, TEMPLATE_NAME, syntax)?)
}

fn check_size(source: &str, syntax: SyntaxConfig) -> Result<()> {
    let too_large = |what: String| Err(Error::new(ErrorKind::SyntaxError, what));
    if source.len() > MAX_SOURCE_BYTES {
        return too_large(format!("it has {} bytes, more than {MAX_SOURCE_BYTES}", source.len()));
    }
    let (mut num_tokens, mut num_elifs) = (0, 0);
    for token in tokenize(source, false, syntax) {
        let (token, span) = token?;
        match token {
            Token::VariableStart | Token::BlockStart => num_tokens = 0,
            Token::Ident("elif") => num_elifs += 1,
            _ => num_tokens += 1,
        }
        if num_tokens > MAX_TAG_TOKENS || num_elifs > MAX_ELIFS {
            let line = span.start_line;
            return too_large(format!(
                "more than {MAX_TAG_TOKENS} tokens in one tag or {MAX_ELIFS} `elif` (line {line})"
            ));
        }
    }
    Ok(())
}

fn statements<'a>(statements: &[Stmt<'a>]) -> Result<Vec<Stmt<'a>>> {
    statements.iter().map(statement).collect()
}

/// Builds a node with new fields and the position of `$node`, because the engine's nodes cannot be
/// changed in place.
macro_rules! rebuilt {
    ($kind:ident::$name:ident, $node:expr, { $($fields:tt)* }) => {
        $kind::$name(like($node, ast::$name { $($fields)* }))
    };
}

fn statement<'a>(stmt: &Stmt<'a>) -> Result<Stmt<'a>> {
    Ok(match stmt {
        Stmt::Template(node) => {
            rebuilt!(Stmt::Template, node, { children: statements(&node.children)? })
        }
        Stmt::EmitExpr(node) => emit(expression(&node.expr)?, node.span()),
        Stmt::EmitRaw(node) => emit(constant(Value::from(node.raw), node.span()), node.span()),
        Stmt::ForLoop(node) => {
            // Write an empty text in each iteration, so that the clock is checked.
            let mut body = vec![emit(constant(Value::from(""), node.span()), node.span())];
            body.extend(statements(&node.body)?);
            rebuilt!(Stmt::ForLoop, node, {
                target: target(&node.target),
                iter: expression(&node.iter)?,
                filter_expr: optional(node.filter_expr.as_ref())?,
                recursive: node.recursive,
                body,
                else_body: statements(&node.else_body)?,
            })
        }
        Stmt::IfCond(node) => rebuilt!(Stmt::IfCond, node, {
            expr: expression(&node.expr)?,
            true_body: statements(&node.true_body)?,
            false_body: statements(&node.false_body)?,
        }),
        Stmt::WithBlock(node) => {
            let assignments = node.assignments.iter();
            let assignments =
                assignments.map(|(name, value)| Ok((target(name), expression(value)?)));
            let assignments = assignments.collect::<Result<Vec<_>>>()?;
            // Evaluate all values in the outer scope, as one tuple.
            let (items, values) = assignments.into_iter().unzip();
            let names = Expr::List(like(node, ast::List { items }));
            let values = Expr::Tuple(like(node, ast::Tuple { items: values }));
            let assignments = vec![(names, values)];
            rebuilt!(Stmt::WithBlock, node, { assignments, body: statements(&node.body)? })
        }
        Stmt::Set(node) => {
            let expr = stored(expression(&node.expr)?, &node.target);
            rebuilt!(Stmt::Set, node, { target: target(&node.target), expr })
        }
        Stmt::SetBlock(node) => {
            let filter = optional(node.filter.as_ref())?;
            let filter = filter_of(SETTLE, filter, Vec::new(), node.span());
            rebuilt!(Stmt::SetBlock, node, {
                target: target(&node.target),
                filter: Some(stored(filter, &node.target)),
                body: statements(&node.body)?,
            })
        }
        Stmt::FilterBlock(node) => {
            let filter = expression(&node.filter)?;
            rebuilt!(Stmt::FilterBlock, node, { filter, body: statements(&node.body)? })
        }
        Stmt::Block(node) => rebuilt!(Stmt::Block, node, {
            name: node.name,
            required: node.required,
            body: statements(&node.body)?,
        }),
        Stmt::Macro(node) => Stmt::Macro(macro_declaration(node)?),
        Stmt::CallBlock(node) => {
            let macro_decl = macro_declaration(&node.macro_decl)?;
            rebuilt!(Stmt::CallBlock, node, { call: call(&node.call)?, macro_decl })
        }
        Stmt::Do(node) => rebuilt!(Stmt::Do, node, { call: call(&node.call)? }),
        Stmt::Continue(node) => rebuilt!(Stmt::Continue, node, {}),
        Stmt::Break(node) => rebuilt!(Stmt::Break, node, {}),
        Stmt::AutoEscape(node) => return Err(unsupported("autoescape", node.span())),
        Stmt::Import(node) => return Err(unsupported("import", node.span())),
        Stmt::FromImport(node) => return Err(unsupported("import", node.span())),
        Stmt::Extends(node) => return Err(unsupported("extends", node.span())),
        Stmt::Include(node) => return Err(unsupported("include", node.span())),
    })
}

fn macro_declaration<'a>(node: &Spanned<ast::Macro<'a>>) -> Result<Spanned<ast::Macro<'a>>> {
    let declaration = ast::Macro {
        name: node.name,
        args: node.args.iter().map(target).collect(),
        defaults: expressions(&node.defaults)?,
        body: statements(&node.body)?,
    };
    Ok(like(node, declaration))
}

fn expression<'a>(expr: &Expr<'a>) -> Result<Expr<'a>> {
    let span = expr.span();
    let rebuilt = match expr {
        Expr::Var(node) => return Ok(rebuilt!(Expr::Var, node, { id: node.id })),
        Expr::Const(node) => return Ok(constant(node.value.clone(), span)),
        Expr::Slice(node) => {
            let bound = |bound: &Option<Expr<'a>>| match bound {
                Some(bound) => expression(bound),
                None => Ok(constant(Value::from(()), span)),
            };
            let bounds = vec![bound(&node.start)?, bound(&node.stop)?, bound(&node.step)?];
            return Ok(filter_of(SLICE, Some(expression(&node.expr)?), bounds, span));
        }
        Expr::UnaryOp(node) => {
            // `UnaryOpKind` is not `Copy`.
            let is_not = matches!(node.op, UnaryOpKind::Not);
            let op = if is_not { UnaryOpKind::Not } else { UnaryOpKind::Neg };
            return Ok(rebuilt!(Expr::UnaryOp, node, { op, expr: expression(&node.expr)? }));
        }
        Expr::IfExpr(node) => {
            return Ok(rebuilt!(Expr::IfExpr, node, {
                test_expr: expression(&node.test_expr)?,
                true_expr: expression(&node.true_expr)?,
                false_expr: optional(node.false_expr.as_ref())?,
            }));
        }
        Expr::GetAttr(node) => {
            let expr = expression(&node.expr)?;
            if is_method(node.name) {
                let name = constant(Value::from(node.name), span);
                return Ok(filter_of(ATTRIBUTE, Some(expr), vec![name], span));
            }
            return Ok(rebuilt!(Expr::GetAttr, node, { expr, name: node.name }));
        }
        Expr::GetItem(node) => {
            let subscript_expr = expression(&node.subscript_expr)?;
            let expr = expression(&node.expr)?;
            if let Expr::Const(name) = &node.subscript_expr
                && name.value.as_str().is_some_and(is_method)
            {
                return Ok(filter_of(ITEM, Some(expr), vec![subscript_expr], span));
            }
            return Ok(rebuilt!(Expr::GetItem, node, { expr, subscript_expr }));
        }
        Expr::BinOp(node) => return binary(node),
        Expr::Compare(node) => {
            let mut rest = Vec::new();
            for op in &node.ops {
                rest.push(constant(Value::from(SIGNS[op.op as usize]), span));
                rest.push(expression(&op.expr)?);
            }
            filter_of(CHAIN, Some(expression(&node.expr)?), rest, span)
        }
        Expr::Filter(node) => rebuilt!(Expr::Filter, node, {
            name: node.name,
            expr: optional(node.expr.as_ref())?,
            args: filter_arguments(node)?,
        }),
        Expr::Test(node) => rebuilt!(Expr::Test, node, {
            name: node.name,
            expr: expression(&node.expr)?,
            args: arguments(&node.args, span)?,
        }),
        Expr::Call(node) => Expr::Call(call(node)?),
        Expr::List(node) => rebuilt!(Expr::List, node, { items: expressions(&node.items)? }),
        Expr::Tuple(node) => rebuilt!(Expr::Tuple, node, { items: expressions(&node.items)? }),
        Expr::Map(node) => {
            let keys = expressions(&node.keys)?;
            rebuilt!(Expr::Map, node, { keys, values: expressions(&node.values)? })
        }
    };
    Ok(settled(rebuilt, span))
}

/// Rewrites an operator. Those that compare or combine values become filters.
fn binary<'a>(node: &Spanned<ast::BinOp<'a>>) -> Result<Expr<'a>> {
    let span = node.span();
    let (left, right) = (expression(&node.left)?, expression(&node.right)?);
    let operator = match node.op {
        BinOpKind::Add => ADD,
        BinOpKind::Mul => MULTIPLY,
        BinOpKind::Concat => CONCATENATE,
        BinOpKind::Rem => REMAINDER,
        BinOpKind::Lt => "<",
        BinOpKind::Lte => "<=",
        BinOpKind::Gt => ">",
        BinOpKind::Gte => ">=",
        op => return Ok(settled(rebuilt!(Expr::BinOp, node, { op, left, right }), span)),
    };
    Ok(filter_of(operator, Some(left), vec![right], span))
}

/// Returns the parameters in Python of a filter that the engine calls otherwise: only by name, if
/// they begin with `=`, or else only by position.
fn parameters(filter: &str) -> &'static str {
    match filter {
        "batch" => "linecount fill_with",
        "center" => "width",
        "d" | "default" => "default_value boolean",
        "dictsort" => "= case_sensitive by reverse",
        "filesizeformat" => "binary",
        "groupby" => "= attribute default case_sensitive",
        "indent" => "width first blank",
        "join" => "d attribute",
        "max" | "min" | "unique" => "= case_sensitive attribute",
        "replace" => "old new count",
        "sort" => "= reverse case_sensitive attribute",
        "tojson" => "= ensure_ascii indent separators sort_keys",
        "trim" => "chars",
        "truncate" => "= length killwords end leeway",
        _ => "",
    }
}

/// Rewrites the arguments of a filter for the engine.
fn filter_arguments<'a>(node: &Spanned<ast::Filter<'a>>) -> Result<Vec<ast::CallArg<'a>>> {
    let span = node.span();
    let mut args = arguments(&node.args, span)?;
    if args.is_empty() && ["int", "float"].contains(&node.name) {
        let zero = if node.name == "int" { Value::from(0) } else { Value::from(0.0) };
        args.push(ast::CallArg::Pos(constant(zero, span)));
    }
    if let Some(names) = parameters(node.name).strip_prefix("= ") {
        for (arg, name) in args.iter_mut().zip(names.split(' ')) {
            if let ast::CallArg::Pos(value) = arg {
                let value = std::mem::replace(value, constant(Value::UNDEFINED, span));
                *arg = ast::CallArg::Kwarg(name, value);
            }
        }
        return Ok(args);
    }
    let num_given = args.iter().take_while(|arg| matches!(arg, ast::CallArg::Pos(_))).count();
    let mut named = args.split_off(num_given);
    for (at, name) in parameters(node.name).split(' ').enumerate().skip(num_given) {
        let is_it = |arg: &ast::CallArg| matches!(arg, ast::CallArg::Kwarg(it, _) if *it == name);
        if let Some(found) = named.iter().position(is_it)
            && let ast::CallArg::Kwarg(_, value) = named.remove(found)
        {
            args.resize_with(at, || ast::CallArg::Pos(constant(Value::UNDEFINED, span)));
            args.push(ast::CallArg::Pos(value));
        }
    }
    args.extend(named);
    Ok(args)
}

fn expressions<'a>(exprs: &[Expr<'a>]) -> Result<Vec<Expr<'a>>> {
    exprs.iter().map(expression).collect()
}

fn optional<'a>(expr: Option<&Expr<'a>>) -> Result<Option<Expr<'a>>> {
    expr.map(expression).transpose()
}

/// Rewrites a call and its arguments. A called name stays, because the compiler inspects it.
fn call<'a>(node: &Spanned<ast::Call<'a>>) -> Result<Spanned<ast::Call<'a>>> {
    let args = arguments(&node.args, node.span())?;
    // The compiler looks for the methods that it calls.
    let expr = match &node.expr {
        Expr::GetAttr(method) => {
            rebuilt!(Expr::GetAttr, method, { expr: expression(&method.expr)?, name: method.name })
        }
        other => expression(other)?,
    };
    Ok(like(node, ast::Call { expr, args }))
}

fn arguments<'a>(args: &[ast::CallArg<'a>], span: Span) -> Result<Vec<ast::CallArg<'a>>> {
    let argument = |arg: &ast::CallArg<'a>| match arg {
        ast::CallArg::Pos(value) => Ok(ast::CallArg::Pos(expression(value)?)),
        ast::CallArg::Kwarg(name, value) => Ok(ast::CallArg::Kwarg(name, expression(value)?)),
        ast::CallArg::PosSplat(_) | ast::CallArg::KwargSplat(_) => Err(unsupported("*", span)),
    };
    args.iter().map(argument).collect()
}

/// Copies the target of an assignment.
fn target<'a>(expr: &Expr<'a>) -> Expr<'a> {
    match expr {
        Expr::Var(node) => rebuilt!(Expr::Var, node, { id: node.id }),
        Expr::GetAttr(node) => {
            rebuilt!(Expr::GetAttr, node, { expr: target(&node.expr), name: node.name })
        }
        Expr::List(node) => {
            rebuilt!(Expr::List, node, { items: node.items.iter().map(target).collect() })
        }
        _ => unreachable!("targets are names, attributes and lists"),
    }
}

/// Adds a check to a value if assigning it to `assigned` sets attributes of namespaces.
fn stored<'a>(value: Expr<'a>, assigned: &Expr<'a>) -> Expr<'a> {
    let mut namespaces = Vec::new();
    find_namespaces(assigned, &mut namespaces);
    if namespaces.is_empty() {
        return value;
    }
    filter_of(STORE, Some(value), namespaces, assigned.span())
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

/// Creates a node with the position of another node.
fn like<T, U>(node: &Spanned<T>, with: U) -> Spanned<U> {
    Spanned::new(with, node.span())
}

fn unsupported(what: &str, span: Span) -> Error {
    let line = span.start_line;
    let problem = format!("`{what}` is not supported in a chat template (line {line})");
    Error::new(ErrorKind::SyntaxError, problem)
}
