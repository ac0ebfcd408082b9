//! What a list of layers must satisfy to be a layout: one embedding, first; one loss, last; all
//! decoder layers before all MTP layers; MTP layers where a rank can run them.

use super::{LayerCount, Layout, MAX_LAYERS, MAX_LAYOUT_STAGES, frame_of_stages};
use crate::error::{Error, Result};
use crate::ids::{Chunk, Rank, Stage};
use crate::shape::{Placement, Shape};

/// A symbol of the layout language.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token {
    /// `E`: the embedding.
    Embedding,
    /// `t`: a decoder layer.
    Decoder,
    /// `m`: a multi-token-prediction layer.
    Mtp,
    /// `L`: final norm, output layer and loss.
    Loss,
    /// `|`: the end of a stage.
    Bar,
}

impl Token {
    /// Reads a symbol of the layout language.
    pub fn from_letter(letter: char) -> Option<Self> {
        match letter {
            'E' => Some(Self::Embedding),
            't' => Some(Self::Decoder),
            'm' => Some(Self::Mtp),
            'L' => Some(Self::Loss),
            '|' => Some(Self::Bar),
            _ => None,
        }
    }

    /// Reads a layer's name (any case) or its letter (as in the language).
    fn from_name(name: &str) -> Option<Self> {
        let name = name.trim();
        match name.to_lowercase().as_str() {
            "embedding" => return Some(Self::Embedding),
            "decoder" => return Some(Self::Decoder),
            "mtp" => return Some(Self::Mtp),
            "loss" => return Some(Self::Loss),
            _ => {}
        }
        let mut letters = name.chars();
        let token = Self::from_letter(letters.next()?)?;
        (letters.next().is_none() && token != Self::Bar).then_some(token)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Embedding => "embedding",
            Self::Decoder => "decoder layer",
            Self::Mtp => "MTP layer",
            Self::Loss => "loss",
            Self::Bar => "end of stage",
        }
    }
}

/// What the caller says of the model, to be compared with the layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Expected {
    /// Number of decoder layers; none: whatever the layout has.
    pub num_layers: Option<u32>,
    /// Number of MTP layers; none: whatever the layout has.
    pub mtp_num_layers: Option<u32>,
}

impl Layout {
    /// From the names of the layers of each stage: `embedding`, `decoder`, `mtp`, `loss`.
    ///
    /// # Errors
    /// If a name is unknown or the layers break a rule of this module.
    pub fn from_names<S: AsRef<str>>(
        names: &[Vec<S>],
        pp: u32,
        vp: Option<u32>,
        expected: Expected,
        placement: Placement,
    ) -> Result<Self> {
        let mut stages = Vec::with_capacity(names.len());
        for (s, stage) in names.iter().enumerate() {
            let tokens: Result<Vec<Token>> = stage
                .iter()
                .enumerate()
                .map(|(i, name)| {
                    let name = name.as_ref();
                    Token::from_name(name).ok_or_else(|| {
                        Error::layout(
                            format!("names[{s}][{i}]={name:?} is not the name of a layer"),
                            "one of \"embedding\", \"decoder\", \"mtp\", \"loss\" (or E, t, m, L)",
                        )
                    })
                })
                .collect();
            stages.push(tokens?);
        }
        layout(&stages, pp, vp, expected, placement)
    }
}

/// Cuts a list of symbols into stages.
pub(super) fn stages(tokens: Vec<Token>) -> Result<Vec<Vec<Token>>> {
    let bars = tokens.iter().filter(|&&token| token == Token::Bar).count();
    if bars as u64 >= MAX_LAYOUT_STAGES {
        return Err(Error::layout(
            format!("the layout has more than {MAX_LAYOUT_STAGES} stages"),
            "lower the multipliers",
        ));
    }
    Ok(tokens
        .split(|&token| token == Token::Bar)
        .map(<[Token]>::to_vec)
        .collect())
}

/// The layout of a list of stages, if it keeps the rules.
pub(super) fn layout(
    stages: &[Vec<Token>],
    pp: u32,
    vp: Option<u32>,
    expected: Expected,
    placement: Placement,
) -> Result<Layout> {
    if stages.iter().all(Vec::is_empty) {
        return Err(Error::layout(
            "the layout is empty",
            "the smallest one is \"EtL\", or [[\"embedding\", \"decoder\", \"loss\"]]",
        ));
    }
    check_ends(stages)?;
    check_order(stages)?;
    let counts: Vec<LayerCount> = stages
        .iter()
        .map(|stage| LayerCount {
            decoder: count(stage, Token::Decoder),
            mtp: count(stage, Token::Mtp),
        })
        .collect();
    let total = |of: fn(&LayerCount) -> u32| counts.iter().map(of).map(u64::from).sum::<u64>();
    let (decoder, mtp) = (total(|c| c.decoder), total(|c| c.mtp));
    for (found, asked, kind, argument) in [
        (decoder, expected.num_layers, "decoder", "num_layers"),
        (mtp, expected.mtp_num_layers, "MTP", "mtp_num_layers"),
    ] {
        if let Some(asked) = asked.filter(|&asked| u64::from(asked) != found) {
            return Err(Error::layout(
                format!("the layout has {found} {kind} layers, but {argument}={asked}"),
                format!(
                    "each of the model's layers must stand in the layout once; or mend {argument}"
                ),
            ));
        }
    }
    if decoder + mtp > MAX_LAYERS {
        return Err(Error::layout(
            format!(
                "the layout has {} layers, more than {MAX_LAYERS}",
                decoder + mtp
            ),
            "lower the number of layers",
        ));
    }
    let shape = frame_of_stages(stages.len(), pp, vp, placement)?;
    check_mtp(&counts, &shape)?;
    Layout::new(shape, counts.into_iter())
}

fn count(stage: &[Token], token: Token) -> u32 {
    super::size(stage.iter().filter(|&&t| t == token).count())
}

/// One embedding, first in the first stage; one loss, last in the last stage. That is where the
/// runtime builds them, so a layout that says otherwise would be a lie.
fn check_ends(stages: &[Vec<Token>]) -> Result<()> {
    for (token, place) in [(Token::Embedding, "first"), (Token::Loss, "last")] {
        let name = token.name();
        let found: u64 = stages.iter().map(|s| u64::from(count(s, token))).sum();
        if found != 1 {
            return Err(Error::layout(
                format!("{name} appears {found} times, expected 1"),
                format!("{name} stands exactly once, {place} in the {place} stage"),
            ));
        }
        let last = stages.len() - 1;
        let home = if token == Token::Embedding { 0 } else { last };
        let at = stages
            .iter()
            .position(|s| s.contains(&token))
            .unwrap_or(home);
        if at != home {
            return Err(Error::layout(
                format!("{name} is in stage {at}, but must be in the {place} stage, {home}"),
                format!(
                    "move it, or remove the stages on its {} side",
                    if home == 0 { "left" } else { "right" }
                ),
            ));
        }
        let (end, side) = if token == Token::Embedding {
            (stages[home].first(), "before")
        } else {
            (stages[home].last(), "after")
        };
        if let Some(&other) = end.filter(|&&end| end != token) {
            return Err(Error::layout(
                format!(
                    "a {} stands {side} the {name} in stage {home}",
                    other.name()
                ),
                format!("{name} comes {place} in its stage"),
            ));
        }
    }
    Ok(())
}

/// No decoder layer behind an MTP layer: MTP reads the decoder's output.
fn check_order(stages: &[Vec<Token>]) -> Result<()> {
    let mut mtp_stage = None;
    for (s, stage) in stages.iter().enumerate() {
        for &token in stage {
            match token {
                Token::Mtp => mtp_stage = mtp_stage.or(Some(s)),
                Token::Decoder => {
                    if let Some(first) = mtp_stage {
                        return Err(Error::layout(
                            format!(
                                "a decoder layer in stage {s} follows an MTP layer in stage {first}"
                            ),
                            "all decoder layers come before all MTP layers",
                        ));
                    }
                }
                Token::Embedding | Token::Loss | Token::Bar => {}
            }
        }
    }
    Ok(())
}

/// MTP layers stand in the last chunk of their rank, and on rank 0 only in the last stage (where
/// the placement puts it there): rank 0 starts every microbatch and must not wait for its end.
fn check_mtp(counts: &[LayerCount], shape: &Shape) -> Result<()> {
    let last = shape.stages_per_replica() - 1;
    for (stage, count) in (0..).map(Stage).zip(counts) {
        if count.mtp == 0 || stage.0 == last {
            continue;
        }
        let (rank, chunk) = (shape.rank_of(stage), shape.chunk_of(stage));
        let above = Chunk(chunk.0 + 1);
        if above.0 < shape.vp() && shape.stage_at(rank, above).is_some() {
            return Err(Error::layout(
                format!(
                    "an MTP layer in stage {stage} is in chunk {chunk} of rank {rank}, but only a \
                     rank's last chunk may have MTP layers"
                ),
                "move it to a later stage",
            ));
        }
        if rank == Rank(0) {
            return Err(Error::layout(
                format!(
                    "an MTP layer in stage {stage} is on rank 0, which may hold none but in the last stage"
                ),
                "move it to a later stage",
            ));
        }
    }
    Ok(())
}
