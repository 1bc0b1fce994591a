//! One rank's memory during a check: what every element holds, who may still be reading it, and
//! what may already be landing in it.

use super::expression::Id;
use super::{Clock, Fault};
use crate::collective::plan::{Space, Span};
use std::ops::Range;

#[derive(Clone, Default)]
struct Cell {
    value: Option<Id>,
    /// The last step of this rank that read or wrote it.
    touched: Option<usize>,
    /// A message for this step has been written straight into it, and the step is still to come.
    landed: Option<usize>,
    /// Sends that read it: (step here, peer, step that receives it there).
    sends: Vec<(usize, usize, usize)>,
}

pub(super) struct Memory {
    cells: Vec<Cell>,
    spaces: [Range<usize>; 3],
}

impl Memory {
    /// `input` holds the values; `output` and `scratch` are lengths.
    pub fn new(input: &[Id], output: usize, scratch: usize, in_place: bool) -> Memory {
        let output_at = if in_place { 0 } else { input.len() };
        let scratch_at = output_at + output;
        let mut cells = vec![Cell::default(); scratch_at + scratch];
        for (cell, &id) in cells.iter_mut().zip(input) {
            cell.value = Some(id);
        }
        Memory { cells, spaces: [0..input.len(), output_at..scratch_at, scratch_at..scratch_at + scratch] }
    }

    /// The cells of a span: it must lie inside its memory.
    pub fn place(&self, span: Span) -> Result<Range<usize>, Fault> {
        let space = &self.spaces[match span.space {
            Space::Input => 0,
            Space::Output => 1,
            Space::Scratch => 2,
        }];
        match span.start.checked_add(span.len) {
            Some(end) if end <= space.len() => Ok(space.start + span.start..space.start + end),
            _ => Err(Fault::OutOfBounds { len: space.len() }),
        }
    }

    /// Step `step` reads `span`.
    pub fn read(&mut self, step: usize, span: Span) -> Result<Vec<Id>, Fault> {
        let place = self.place(span)?;
        let read = |cell: &mut Cell| {
            if let Some(landing) = cell.landed {
                return Err(Fault::MayHaveLanded { landing });
            }
            cell.touched = Some(step);
            cell.value.ok_or(Fault::Uninitialized)
        };
        self.cells[place].iter_mut().map(read).collect()
    }

    /// Step `step` publishes `span` to `peer`, whose step `received` takes it.
    pub fn publish(&mut self, step: usize, span: Span, peer: usize, received: usize) -> Result<(), Fault> {
        self.read(step, span)?;
        let place = self.place(span)?;
        for cell in &mut self.cells[place] {
            cell.sends.push((step, peer, received));
        }
        Ok(())
    }

    /// What a peer finds in a published span.
    pub fn peek(&self, span: Span) -> Result<Vec<Id>, Fault> {
        let place = self.place(span)?;
        self.cells[place].iter().map(|cell| cell.value.ok_or(Fault::Uninitialized)).collect()
    }

    /// Step `step` writes `span`, when all that `known` says has happened.
    pub fn write(&mut self, step: usize, span: Span, values: &[Id], known: &Clock) -> Result<(), Fault> {
        let place = self.place(span)?;
        for (cell, &value) in self.cells[place].iter_mut().zip(values) {
            if let Some(landing) = cell.landed {
                return Err(Fault::MayHaveLanded { landing });
            }
            cell.overwrite(value, known)?;
            cell.touched = Some(step);
        }
        Ok(())
    }

    /// The message for step `step` of this `rank` lands in `span` without being asked for again: at the
    /// earliest when its sender, who then knew `known`, sends it.
    pub fn land(&mut self, rank: usize, step: usize, span: Span, values: &[Id], known: &Clock) -> Result<(), Fault> {
        let place = self.place(span)?;
        for (cell, &value) in self.cells[place].iter_mut().zip(values) {
            if let Some(landing) = cell.landed {
                return Err(Fault::MayHaveLanded { landing });
            }
            if let Some(user) = cell.touched.filter(|&user| !known.has_done(rank, user)) {
                return Err(Fault::LandsTooEarly { user });
            }
            cell.overwrite(value, known)?;
            cell.landed = Some(step);
        }
        Ok(())
    }

    /// Step `step` has taken note of what landed in `span`, and turned it into `values`.
    pub fn take(&mut self, step: usize, span: Span, values: &[Id]) -> Result<(), Fault> {
        let place = self.place(span)?;
        for (cell, &value) in self.cells[place].iter_mut().zip(values) {
            *cell = Cell { value: Some(value), touched: Some(step), landed: None, sends: Vec::new() };
        }
        Ok(())
    }
}

impl Cell {
    fn overwrite(&mut self, value: Id, known: &Clock) -> Result<(), Fault> {
        if let Some(&(send, peer, _)) = self.sends.iter().find(|&&(_, peer, received)| !known.has_done(peer, received))
        {
            return Err(Fault::InFlight { send, peer });
        }
        self.sends.clear();
        self.value = Some(value);
        Ok(())
    }
}
