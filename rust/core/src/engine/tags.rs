//! What operations are for, in words: calls carry a number, people read this.

use std::fmt;
use std::ops::RangeInclusive;
use std::sync::{PoisonError, RwLock};

static NAMES: RwLock<Vec<(RangeInclusive<u32>, String)>> = RwLock::new(Vec::new());

/// From now on errors and warnings of this process call these tags by `words`, in which `{}` stands for the distance
/// from the first of them. Named again, they are called by the last words.
pub fn name_tags(tags: RangeInclusive<u32>, words: &str) {
    let mut names = NAMES.write().unwrap_or_else(PoisonError::into_inner);
    names.retain(|(named, _)| *named != tags);
    names.push((tags, words.to_owned()));
}

/// Writes a tag in words, or as a number if it has no name.
pub(super) struct Named(pub(super) u32);

impl fmt::Display for Named {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = NAMES.read().unwrap_or_else(PoisonError::into_inner);
        match names.iter().find(|(tags, _)| tags.contains(&self.0)) {
            Some((tags, words)) => f.write_str(&words.replace("{}", &(self.0 - tags.start()).to_string())),
            None => write!(f, "tag {:#x}", self.0),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tags_are_shown_by_their_last_names() {
        // A range of this test's own: names are the whole process's.
        assert_eq!(Named(0x7000_0003).to_string(), "tag 0x70000003");
        name_tags(0x7000_0000..=0x7000_0009, "the {}th of the first");
        name_tags(0x7000_0000..=0x7000_0009, "bucket {}");
        name_tags(0x7000_000a..=0x7000_000a, "the end");
        assert_eq!(Named(0x7000_0000).to_string(), "bucket 0");
        assert_eq!(Named(0x7000_0009).to_string(), "bucket 9");
        assert_eq!(Named(0x7000_000a).to_string(), "the end");
        assert_eq!(Named(0x7000_000b).to_string(), "tag 0x7000000b");
    }
}
