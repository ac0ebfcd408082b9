//! [`Error`]: what the planner says of bad input. Always what, where and what was expected, then a
//! hint on its own line.

use std::fmt;

use crate::violation::Violation;

/// Which subject an error is about; each is an exception class of its own in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorKind {
    /// An argument of a plan is out of range or contradicts another.
    Config,
    /// A layout loses, repeats or misplaces a layer, or its text is wrong.
    Layout,
    /// A text, CSV or saved plan can't be read.
    Parse,
    /// A plan breaks a rule.
    Check,
    /// A search found nothing within its limits.
    Search,
}

/// An error of the planner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error {
    /// The subject.
    pub kind: ErrorKind,
    /// What is wrong: names the argument, its value and the limit.
    pub message: String,
    /// How to mend it.
    pub hint: String,
    /// The broken rules, for [`ErrorKind::Check`].
    pub violations: Vec<Violation>,
}

/// The result of planning.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    fn new(kind: ErrorKind, message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self {
            kind,
            message: message.into(),
            hint: hint.into(),
            violations: Vec::new(),
        }
    }

    /// An error about an argument.
    pub fn config(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorKind::Config, message, hint)
    }

    /// An error about a layout.
    pub fn layout(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorKind::Layout, message, hint)
    }

    /// An error about a text.
    pub fn parse(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorKind::Parse, message, hint)
    }

    /// An error about a search.
    pub fn search(message: impl Into<String>, hint: impl Into<String>) -> Self {
        Self::new(ErrorKind::Search, message, hint)
    }

    /// A plan that breaks rules: the message lists the first few, `violations` has all.
    pub fn check(
        message: impl Into<String>,
        hint: impl Into<String>,
        violations: Vec<Violation>,
    ) -> Self {
        Self {
            violations,
            ..Self::new(ErrorKind::Check, message, hint)
        }
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\nhint: {}", self.message, self.hint)
    }
}

impl std::error::Error for Error {}
