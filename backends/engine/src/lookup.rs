//! Prompt lookup: draft tokens copied from where the end of a text occurred before, and the number of them that pays.
//!
//! The last tokens of a sequence are looked up in its own prompt and output; the tokens that followed them there are
//! drafts of the next ones. A step computes the drafts' rows beside that of the last token, and draws at each position
//! as it would without drafts. A draft stands if it equals the drawn token, so drafts never change a token.
//!
//! [`Index`] finds the occurrences: chains of positions by the hash of the tokens before them, as LZ77 compressors keep
//! them. [`Lookup`] holds the index of one sequence and what became of its drafts. [`RowCost`] measures what a further row
//! of a step costs: where that is much, as on a device that is busy with few rows, only drafts that nearly always stand are worth it.

/// Least tokens at the end of a text that must have occurred before.
const MATCH_MIN: usize = 2;
/// Most tokens that are compared; of longer matches the latest counts.
const MATCH_MAX: usize = 8;
/// Occurrences that are compared, latest first.
const OCCURRENCES: usize = 16;

/// Most drafts of a sequence in one step, whatever the configuration says.
const DRAFTS_MAX: usize = 64;
/// Acceptance that a sequence's drafts are assumed to have before one was tried.
const RATE_FIRST: f64 = 0.5;
/// Weight of one draft in the measured acceptance.
const RATE_FRESH: f64 = 0.25;
/// Output tokens without drafts after a rejection that showed that they do not pay; doubles each time.
const REST_MIN: usize = 16;
/// Most output tokens without drafts.
const REST_MAX: usize = 256;

/// Least price of a draft: drawing its token and its place in the step are never free.
const PRICE_MIN: f64 = 0.1;
/// Price from which nothing is drafted, not even to see whether it would stand: the device has no spare rows.
const PRICE_MAX: f64 = 0.9;
/// Price before it is measured.
const PRICE_UNKNOWN: f64 = 0.25;

/// Tokens of a sequence.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Text<'a> {
    pub(crate) prompt: &'a [u32],
    pub(crate) output: &'a [u32],
}

impl Text<'_> {
    fn len(self) -> usize {
        self.prompt.len() + self.output.len()
    }

    fn at(self, position: usize) -> u32 {
        self.prompt.get(position).copied().unwrap_or_else(|| self.output[position - self.prompt.len()])
    }

    /// Number of equal tokens before two positions, counted backwards, [`MATCH_MAX`] at most. `earlier` < `later`.
    fn match_before(self, earlier: usize, later: usize) -> usize {
        (1..=earlier.min(MATCH_MAX)).take_while(|&back| self.at(earlier - back) == self.at(later - back)).count()
    }
}

/// Positions of a text by the hash of the [`MATCH_MIN`] tokens before them. Memory: 8 to 20 bytes per token.
#[derive(Clone, Debug, Default)]
struct Index {
    /// Latest position of each hash, or [`NONE`]; a power of two of them, or none.
    latest: Vec<u32>,
    /// Position before it with the same hash, or [`NONE`], of each position from [`MATCH_MIN`] on.
    earlier: Vec<u32>,
}

/// Absence of a position.
const NONE: u32 = u32::MAX;

impl Index {
    /// Position after the longest match of the text's last tokens, the latest of equally long ones. Cost: O(1) per
    /// token since the last call.
    fn find(&mut self, text: Text<'_>) -> Option<usize> {
        self.catch_up(text);
        if self.latest.is_empty() {
            return None;
        }
        let (mut best, mut length) = (None, MATCH_MIN - 1);
        let mut next = self.latest[self.slot(text, text.len())];
        for _ in 0..OCCURRENCES {
            if next == NONE || length == MATCH_MAX {
                break;
            }
            let position = next as usize;
            let matching = text.match_before(position, text.len());
            if matching > length {
                (best, length) = (Some(position), matching);
            }
            next = self.earlier[position - MATCH_MIN];
        }
        best
    }

    /// Adds the positions that have come since the last call. The end of the text is not one: nothing follows it.
    fn catch_up(&mut self, text: Text<'_>) {
        if self.earlier.len() + MATCH_MIN >= text.len() {
            return;
        }
        if text.len() > self.latest.len() {
            self.latest.clear();
            self.latest.resize((text.len() * 2).next_power_of_two(), NONE);
            self.earlier.clear();
        }
        for position in self.earlier.len() + MATCH_MIN..text.len() {
            let slot = self.slot(text, position);
            self.earlier.push(std::mem::replace(&mut self.latest[slot], position as u32));
        }
    }

    fn slot(&self, text: Text<'_>, position: usize) -> usize {
        let mix = |hash: u64, back| (hash ^ u64::from(text.at(position - back))).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let hash = (1..=MATCH_MIN).fold(0, mix);
        (hash >> 32) as usize & (self.latest.len() - 1)
    }
}

/// Prompt lookup of one sequence: the index of its text, and the share of its drafts that stood.
#[derive(Clone, Debug)]
pub(crate) struct Lookup {
    index: Index,
    /// Share of drafts that stood, where all before them did; faded.
    rate: f64,
    /// Length of the output at which drafts are next tried.
    rests_until: usize,
    /// Output tokens of the next rest.
    rest: usize,
}

impl Default for Lookup {
    fn default() -> Self {
        Self { index: Index::default(), rate: RATE_FIRST, rests_until: 0, rest: REST_MIN }
    }
}

impl Lookup {
    /// Replaces `drafts` by the tokens that may follow `text`, `most` at most, and no more than are worth their `price`
    /// (see [`RowCost::price`]).
    pub(crate) fn propose(&mut self, text: Text<'_>, most: usize, price: f64, drafts: &mut Vec<u32>) {
        drafts.clear();
        let count = most.min(self.worth(text.output.len(), price));
        if count == 0 {
            return;
        }
        let Some(position) = self.index.find(text) else { return };
        for next in position..position + count {
            // A match that reaches the end of the text repeats itself.
            let token = if next < text.len() { text.at(next) } else { drafts[next - text.len()] };
            drafts.push(token);
        }
    }

    /// Number of drafts that stand so often that their rows pay: each stands only if those before it do. One after a rest, to see.
    fn worth(&self, output_tokens: usize, price: f64) -> usize {
        if price >= PRICE_MAX || output_tokens < self.rests_until {
            return 0;
        }
        let mut chance = self.rate;
        let pays = std::iter::from_fn(|| {
            let pays = chance > price;
            chance *= self.rate;
            pays.then_some(())
        });
        pays.take(DRAFTS_MAX).count().max(1)
    }

    /// Records the drafts of a step: `accepted` of them stood, and the one after those did not if `rejected`.
    /// `output_tokens`: length of the output after the step.
    pub(crate) fn learn(&mut self, accepted: usize, rejected: bool, price: f64, output_tokens: usize) {
        for _ in 0..accepted.min(DRAFTS_MAX) {
            self.rate += (1.0 - self.rate) * RATE_FRESH;
        }
        if rejected {
            self.rate -= self.rate * RATE_FRESH;
        }
        if self.rate > price {
            self.rest = REST_MIN;
        } else if rejected {
            self.rests_until = output_tokens + self.rest;
            self.rest = (self.rest * 2).min(REST_MAX);
        }
    }
}

/// Duration of steps without prefill as `base + row · rows`: least squares over fading memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowCost {
    weight: f64,
    rows: f64,
    seconds: f64,
    rows_squared: f64,
    rows_seconds: f64,
    /// Seconds per row; `None` until steps of different numbers of rows were seen.
    row: Option<f64>,
}

/// Weight of the past at each step: about the last three hundred steps count.
const COST_FADE: f64 = 0.997;
/// A step that took this many times the mean was held up by something else; it counts as this long.
const SECONDS_FACTOR_MAX: f64 = 3.0;
/// Least variance of the rows, relative to the square of their mean, from which their cost is measured.
const VARIANCE_MIN: f64 = 0.02;

impl RowCost {
    /// Records a step of `rows` rows without prefill.
    pub(crate) fn observe(&mut self, rows: usize, seconds: f64) {
        let mean = |sum: f64, weight: f64| if weight > 0.0 { sum / weight } else { 0.0 };
        let known = mean(self.seconds, self.weight);
        let seconds = if known > 0.0 { seconds.min(known * SECONDS_FACTOR_MAX) } else { seconds };
        let rows = rows as f64;
        let fade = |sum: &mut f64, value: f64| *sum = *sum * COST_FADE + value;
        fade(&mut self.weight, 1.0);
        fade(&mut self.rows, rows);
        fade(&mut self.seconds, seconds);
        fade(&mut self.rows_squared, rows * rows);
        fade(&mut self.rows_seconds, rows * seconds);
        let (mean_rows, mean_seconds) = (self.rows / self.weight, self.seconds / self.weight);
        let variance = self.rows_squared / self.weight - mean_rows * mean_rows;
        if variance > VARIANCE_MIN * mean_rows * mean_rows {
            let slope = (self.rows_seconds / self.weight - mean_rows * mean_seconds) / variance;
            self.row = Some(slope.max(0.0));
        }
    }

    /// Price of a draft while `sequences` decode: time of a row as a share of the time that a step takes for each of its
    /// tokens. A draft pays if it stands more often than that.
    pub(crate) fn price(&self, sequences: usize) -> f64 {
        let Some(row) = self.row.filter(|_| self.seconds > 0.0) else { return PRICE_UNKNOWN };
        let (mean_rows, mean_seconds) = (self.rows / self.weight, self.seconds / self.weight);
        let base = (mean_seconds - row * mean_rows).max(0.0);
        let rows = row * sequences as f64;
        if base + rows > 0.0 { (rows / (base + rows)).max(PRICE_MIN) } else { PRICE_MIN }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text<'a>(prompt: &'a [u32], output: &'a [u32]) -> Text<'a> {
        Text { prompt, output }
    }

    /// Drafts after a text, as many as wanted.
    fn drafts(tokens: &[u32], count: usize) -> Vec<u32> {
        let mut lookup = Lookup { rate: 1.0, ..Lookup::default() };
        let mut drafts = vec![99];
        lookup.propose(text(tokens, &[]), count, PRICE_MIN, &mut drafts);
        drafts
    }

    #[test]
    fn what_followed_the_longest_match_is_drafted() {
        assert_eq!(drafts(&[1, 2, 3, 4, 5, 1, 2], 2), [3, 4]);
        // The latest of equal matches, and a longer one before a later one.
        assert_eq!(drafts(&[1, 2, 3, 9, 1, 2, 4, 9, 8, 1, 2], 1), [4]);
        assert_eq!(drafts(&[7, 1, 2, 3, 9, 1, 2, 4, 7, 1, 2], 1), [3]);
        // Behind the end of the text, the match repeats itself.
        assert_eq!(drafts(&[5, 6, 5, 6], 5), [5, 6, 5, 6, 5]);
        assert_eq!(drafts(&[6, 6, 6], 3), [6, 6, 6]);
        for nothing in [&[][..], &[1], &[1, 1], &[1, 2, 3, 4, 2, 4], &[1, 2, 1]] {
            assert!(drafts(nothing, 4).is_empty(), "{nothing:?}");
        }
        assert!(drafts(&[1, 2, 3, 1, 2], 0).is_empty());
    }

    /// Position that a scan of the whole text finds.
    fn scan(tokens: &[u32]) -> Option<usize> {
        let length = |position: usize| text(tokens, &[]).match_before(position, tokens.len());
        let longest = (0..tokens.len()).map(length).max().filter(|longest| *longest >= MATCH_MIN)?;
        (0..tokens.len()).rfind(|position| length(*position) == longest)
    }

    proptest! {
        /// Texts are so short that every occurrence is compared.
        #[test]
        fn the_index_finds_what_a_scan_finds(
            tokens in prop::collection::vec(0..3_u32, 0..OCCURRENCES + MATCH_MIN),
            split in 0..20_usize,
        ) {
            // The index grows with the output, as in a sequence.
            let mut index = Index::default();
            let (prompt, output) = tokens.split_at(split.min(tokens.len()));
            for end in 0..=output.len() {
                let found = index.find(text(prompt, &output[..end]));
                prop_assert_eq!(found, scan(&tokens[..prompt.len() + end]));
            }
        }

        /// In a long text the occurrence may not be the best one, but it is one.
        #[test]
        fn what_the_index_finds_occurs(tokens in prop::collection::vec(0..6_u32, 0..600), every in 1..50_usize) {
            let mut index = Index::default();
            for end in (0..=tokens.len()).step_by(every) {
                let tokens = &tokens[..end];
                let Some(position) = index.find(text(tokens, &[])) else {
                    // Only collisions of hashes hide a match, and six tokens give few pairs.
                    continue;
                };
                prop_assert!(position < end && text(tokens, &[]).match_before(position, end) >= MATCH_MIN);
            }
            prop_assert!(index.latest.len() <= 4 * tokens.len().max(1) && index.earlier.len() <= tokens.len());
        }
    }

    #[test]
    fn drafts_become_more_while_they_stand_and_rest_when_they_do_not() {
        let mut lookup = Lookup::default();
        assert_eq!(lookup.worth(0, 0.3), 1, "one at first");
        for tokens in 0..8 {
            lookup.learn(1, false, 0.3, tokens);
        }
        assert!(lookup.worth(8, 0.3) >= 8, "{lookup:?}");
        lookup.learn(0, true, 0.3, 9);
        assert!((1..8).contains(&lookup.worth(9, 0.3)), "{lookup:?}");
        let mut tokens = 9;
        let mut rests = Vec::new();
        for _ in 0..20 {
            lookup.learn(0, true, 0.3, tokens);
            let rest = (0..).find(|more| lookup.worth(tokens + more, 0.3) > 0).expect("a rest ends");
            rests.push(rest);
            tokens += rest;
        }
        rests.retain(|rest| *rest > 0);
        assert_eq!(rests[..6], [16, 32, 64, 128, 256, 256]);
        assert_eq!(lookup.worth(tokens, 0.3), 1, "one after a rest");
        assert_eq!(lookup.worth(tokens, PRICE_MAX), 0, "no row is spare");
    }

    #[test]
    fn the_price_is_the_share_of_a_row() {
        let mut cost = RowCost::default();
        assert_eq!(cost.price(1), PRICE_UNKNOWN);
        (0..50).for_each(|_| cost.observe(1, 0.010));
        assert_eq!(cost.price(1), PRICE_UNKNOWN, "one row says nothing about two");
        let seconds = |rows: usize| 0.008 + 0.002 * rows as f64;
        for step in 0..200 {
            let rows = 1 + step % 5;
            // One step in fifty is held up.
            cost.observe(rows, seconds(rows) * if step % 50 == 49 { 40.0 } else { 1.0 });
        }
        assert!((cost.price(1) - 0.2).abs() < 0.1, "{}", cost.price(1));
        assert!((cost.price(4) - 0.5).abs() < 0.15, "{}", cost.price(4));
        let mut busy = RowCost::default();
        (0..100).for_each(|step| busy.observe(1 + step % 4, (1 + step % 4) as f64));
        assert!(busy.price(1) > PRICE_MAX, "{}", busy.price(1));
        // A clock that stands still, as in simulations, measures nothing.
        let mut still = RowCost::default();
        (0..100).for_each(|step| still.observe(1 + step % 4, 0.0));
        assert_eq!(still.price(3), PRICE_UNKNOWN);
    }
}
