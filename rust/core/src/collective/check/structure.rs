//! What can be said of plans without running them: steps that make sense, messages that match.

use super::memory::Memory;
use super::{Fault, Rank, Violation};
use crate::collective::plan::{Source, Space, Span, Step};

/// What can be said of a step by itself.
pub(super) fn well_formed(
    step: &Step,
    rank: usize,
    size: usize,
    chunk: usize,
    memory: &Memory,
) -> Result<(), (Option<Span>, Fault)> {
    let inside = |span: Span| match span.len {
        len if len == 0 || len > chunk.max(1) => Err((Some(span), Fault::Size { chunk })),
        _ => memory.place(span).map_err(|fault| (Some(span), fault)),
    };
    let peer_exists = |peer: usize, span: Span| match peer {
        peer if peer == rank || peer >= size => Err((Some(span), Fault::NoPeer { peer })),
        _ => Ok(()),
    };
    match *step {
        Step::Send { peer, from } => {
            peer_exists(peer, from)?;
            inside(from)?;
        }
        Step::Store { source, with, into, .. } => {
            let target = inside(into)?;
            if into.space == Space::Input {
                return Err((Some(into), Fault::WritesInput));
            }
            let mut operands = Vec::from_iter(with);
            match source {
                Source::Local(span) => operands.push(span),
                Source::Message { peer, .. } => peer_exists(peer, into)?,
            }
            for other in operands {
                let place = inside(other)?;
                let apart = place.end <= target.start || target.end <= place.start;
                if other.len != into.len || !(apart || place == target) {
                    return Err((Some(into), Fault::Operand { other }));
                }
            }
        }
    }
    Ok(())
}

/// The k-th send from a to b meets b's k-th receive from a.
pub(super) fn match_messages(ranks: &mut [Rank]) -> Result<(), Violation> {
    let size = ranks.len();
    let mut sends = vec![Vec::new(); size * size];
    for (rank, me) in ranks.iter().enumerate() {
        for (number, step) in me.steps.iter().enumerate() {
            if let Step::Send { peer, from } = *step {
                sends[rank * size + peer].push((number, from));
            }
        }
    }
    let mut sends: Vec<_> = sends.into_iter().map(Vec::into_iter).collect();
    for rank in 0..size {
        for number in 0..ranks[rank].steps.len() {
            let Step::Store { source: Source::Message { peer, kind }, into, .. } = ranks[rank].steps[number] else {
                continue;
            };
            let wrong = |fault| Violation::at(rank, number, into, fault);
            let Some((step, from)) = sends[peer * size + rank].next() else {
                return Err(wrong(Fault::Unmatched { peer }));
            };
            if from.len != into.len {
                return Err(wrong(Fault::Length { peer, step, sent: from.len, awaited: into.len }));
            }
            if from.kind() != kind {
                return Err(wrong(Fault::WrongKind { peer, step, sent: from.kind(), awaited: kind }));
            }
            ranks[rank].partner[number] = step;
            ranks[peer].partner[step] = number;
        }
    }
    for (pair, mut left) in sends.into_iter().enumerate() {
        if let Some((step, from)) = left.next() {
            return Err(Violation::at(pair / size, step, from, Fault::Unmatched { peer: pair % size }));
        }
    }
    Ok(())
}
