//! The layout language: `Et*3|(tt|)*29,m|L`.
//!
//! ```text
//! layout := item*
//! item   := symbol times? | group (times times?)?
//! symbol := 'E' | 't' | 'm' | 'L' | '|'
//! group  := '(' item+ ')'
//! times  := '*' number
//! ```
//!
//! `E` embedding, `t` decoder layer, `m` MTP layer, `L` loss; `|` ends a stage. Commas and
//! whitespace stand anywhere outside a number and mean nothing.
//!
//! It is Megatron-core's language plus nesting, groups without a multiplier, and whitespace. A
//! second multiplier after a group repeats the group's last symbol, as there: `(t)*2*3` is four
//! layers. After a single symbol it is refused, as there.

use std::fmt;

use super::rules::{self, Expected, Token};
use super::{Layout, StageContent};
use crate::error::{Error, Result};
use crate::shape::Placement;

/// Most symbols that a text may expand to, dropped ones included, so that no text takes long. A
/// full layout of the largest size still fits.
const MAX_TOKENS: usize = 1 << 22;
/// Deepest nesting of parentheses.
const MAX_DEPTH: usize = 64;

impl Layout {
    /// Reads the layout language. `vp` is inferred from the number of stages if not given.
    ///
    /// # Errors
    /// If the text is malformed (the message points at the place), or its layers break a rule of
    /// [`rules`].
    pub fn from_text(
        text: &str,
        pp: u32,
        vp: Option<u32>,
        expected: Expected,
        placement: Placement,
    ) -> Result<Self> {
        let stages = rules::stages(Reader::new(text).expand()?)?;
        rules::layout(&stages, pp, vp, expected, placement)
    }
}

/// What a `*` right here would repeat.
#[derive(Clone, Copy)]
enum Last {
    /// Nothing: the start of the text or of a group.
    Nothing,
    /// The symbol that starts here in the output.
    Symbol(usize),
    /// The group that starts here.
    Group(usize),
    /// The last symbol of a group that was multiplied.
    EndOfGroup(usize),
    /// Nothing any more: it was multiplied.
    Multiplied,
}

/// One pass over the text with an explicit stack: no recursion to overflow.
struct Reader<'a> {
    text: &'a str,
    out: Vec<Token>,
    /// Open groups: where each starts in the text and in the output.
    open: Vec<(usize, usize)>,
    last: Last,
    /// Symbols written so far, those that `*0` dropped included.
    written: usize,
}

impl<'a> Reader<'a> {
    fn new(text: &'a str) -> Self {
        Self {
            text,
            out: Vec::new(),
            open: Vec::new(),
            last: Last::Nothing,
            written: 0,
        }
    }

    fn expand(mut self) -> Result<Vec<Token>> {
        let mut rest = self.text.char_indices().peekable();
        while let Some((at, symbol)) = rest.next() {
            match symbol {
                ',' => {}
                '(' => self.open_group(at)?,
                ')' => self.close_group(at)?,
                '*' => {
                    while rest
                        .next_if(|&(_, c)| c == ',' || c.is_whitespace())
                        .is_some()
                    {}
                    let mut times: Option<usize> = None;
                    while let Some((_, digit)) = rest.next_if(|&(_, c)| c.is_ascii_digit()) {
                        let digit = digit as usize - '0' as usize;
                        let so_far = times.unwrap_or(0);
                        times = Some(so_far.saturating_mul(10).saturating_add(digit));
                    }
                    self.multiply(at, times)?;
                }
                _ if symbol.is_whitespace() => {}
                _ => self.push(at, symbol)?,
            }
        }
        match self.open.last() {
            None => Ok(self.out),
            Some(&(at, _)) => Err(self.error(
                at,
                "`(` is never closed",
                "close it with `)`, as in (tt|)*3",
            )),
        }
    }

    fn push(&mut self, at: usize, symbol: char) -> Result<()> {
        let Some(token) = Token::from_letter(symbol) else {
            return Err(if symbol.is_ascii_digit() {
                self.error(
                    at,
                    &format!("`{symbol}` without `*` in front of the number"),
                    "a multiplier is written t*3 or (tt|)*29, its digits together",
                )
            } else {
                self.error(
                    at,
                    &format!("`{symbol}` is not part of the layout language"),
                    "E embedding, t decoder layer, m MTP layer, L loss, | end of stage, \
                     ( ) groups, *n repeats; case matters",
                )
            });
        };
        self.last = Last::Symbol(self.out.len());
        self.out.push(token);
        self.count_written(at, 1)
    }

    fn open_group(&mut self, at: usize) -> Result<()> {
        if self.open.len() == MAX_DEPTH {
            return Err(self.error(
                at,
                &format!("parentheses nest deeper than {MAX_DEPTH}"),
                "write the inner groups out",
            ));
        }
        self.open.push((at, self.out.len()));
        self.last = Last::Nothing;
        Ok(())
    }

    fn close_group(&mut self, at: usize) -> Result<()> {
        let Some((_, start)) = self.open.pop() else {
            return Err(self.error(at, "`)` closes nothing", "remove it or add the `(`"));
        };
        if matches!(self.last, Last::Nothing) {
            return Err(self.error(at, "the parentheses are empty", "put layers into them"));
        }
        self.last = Last::Group(start);
        Ok(())
    }

    fn multiply(&mut self, at: usize, times: Option<usize>) -> Result<()> {
        let Some(times) = times else {
            return Err(self.error(at, "`*` without a number", "write t*3 or (tt|)*29"));
        };
        let start = match self.last {
            Last::Symbol(start) | Last::Group(start) | Last::EndOfGroup(start) => start,
            Last::Nothing => {
                return Err(self.error(
                    at,
                    "`*` has nothing to repeat",
                    "a multiplier follows a symbol or a group: t*3 or (tt|)*29",
                ));
            }
            Last::Multiplied => {
                return Err(self.error(
                    at,
                    "a second `*` is ambiguous",
                    "multiply the numbers, or use parentheses: (t*2)*3 is six layers",
                ));
            }
        };
        let unit = self.out.len() - start;
        self.count_written(at, unit.saturating_mul(times))?;
        if times == 0 {
            self.out.truncate(start);
        } else if unit > 0 {
            for _ in 1..times {
                self.out.extend_from_within(start..start + unit);
            }
        }
        self.last = match self.last {
            Last::Group(_) if self.out.len() > start => Last::EndOfGroup(self.out.len() - 1),
            Last::Group(_)
            | Last::Symbol(_)
            | Last::EndOfGroup(_)
            | Last::Nothing
            | Last::Multiplied => Last::Multiplied,
        };
        Ok(())
    }

    fn count_written(&mut self, at: usize, more: usize) -> Result<()> {
        self.written = self.written.saturating_add(more);
        if self.written <= MAX_TOKENS {
            return Ok(());
        }
        Err(self.error(
            at,
            &format!("the layout expands to more than {MAX_TOKENS} symbols"),
            "lower the multiplier",
        ))
    }

    /// An error with the neighbourhood of `at` (a byte of the text) and an arrow below it.
    fn error(&self, at: usize, message: &str, hint: &str) -> Error {
        const REACH: usize = 30;
        let (before, after) = self.text.split_at(at);
        let line = before.split('\n').next_back().unwrap_or(before);
        let number = before.matches('\n').count() + 1;
        let column = line.chars().count();
        let from = column.saturating_sub(REACH);
        let rest = after.split('\n').next().unwrap_or(after);
        let shown: String = line
            .chars()
            .skip(from)
            .chain(rest.chars().take(REACH))
            .map(|c| if c.is_control() { ' ' } else { c })
            .collect();
        let place = if self.text.contains('\n') {
            format!("line {number}, column {}", column + 1)
        } else {
            format!("column {}", column + 1)
        };
        let arrow = " ".repeat(column - from);
        Error::layout(
            format!("layout text, {place}: {message}\n  {shown}\n  {arrow}^"),
            hint,
        )
    }
}

/// The layout language. Reading it back with the same `pp` and placement gives an equal layout,
/// and Megatron-core reads it too.
impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let texts: Vec<String> = self.stages.iter().map(|&stage| stage_text(stage)).collect();
        let Some((last, ended)) = texts.split_last() else {
            return Ok(());
        };
        for run in ended.chunk_by(|a, b| a == b) {
            let grouped = format!("({}|)*{}", run[0], run.len());
            if grouped.len() < run.len() * (run[0].len() + 1) {
                f.write_str(&grouped)?;
            } else {
                for text in run {
                    write!(f, "{text}|")?;
                }
            }
        }
        f.write_str(last)
    }
}

fn stage_text(stage: StageContent) -> String {
    let mut text = String::new();
    if stage.pre_process {
        text.push('E');
    }
    for (letter, count) in [("t", stage.num_layers), ("m", stage.num_mtp_layers)] {
        if count <= 3 {
            text += &letter.repeat(count as usize);
        } else {
            text += letter;
            text += "*";
            text += &count.to_string();
        }
    }
    if stage.post_process {
        text.push('L');
    }
    text
}
