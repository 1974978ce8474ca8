//! Selection of cells of a matrix in which every pair of values of two factors occurs.

/// Indices of the selected `cells`; always the same ones. A cell is one value of each factor.
pub fn pairwise<const N: usize>(cells: &[[usize; N]]) -> Vec<usize> {
    let mut missing: Vec<_> = cells.iter().flat_map(pairs).collect();
    missing.sort_unstable();
    missing.dedup();
    let mut chosen = Vec::new();
    while !missing.is_empty() {
        let news = |at: &usize| pairs(&cells[*at]).filter(|pair| missing.binary_search(pair).is_ok()).count();
        // The last of equals, so that the first value is not always taken.
        let best = (0..cells.len()).max_by_key(news).expect("there are cells");
        missing.retain(|pair| !pairs(&cells[best]).any(|met| met == *pair));
        chosen.push(best);
    }
    chosen
}

/// All pairs of factors of a cell, with their values.
fn pairs<const N: usize>(cell: &[usize; N]) -> impl Iterator<Item = [(usize, usize); 2]> {
    let cell = *cell;
    (0..N).flat_map(move |first| (first + 1..N).map(move |second| [(first, cell[first]), (second, cell[second])]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_two_meet_in_few_cells() {
        let cells: Vec<[usize; 4]> = (0..3 * 2 * 6 * 4).map(|n| [n % 3, n / 3 % 2, n / 6 % 6, n / 36]).collect();
        let chosen = pairwise(&cells);
        let meets = |pair| chosen.iter().any(|at| pairs(&cells[*at]).any(|met| met == pair));
        assert!(cells.iter().flat_map(pairs).all(meets));
        assert!((24..=30).contains(&chosen.len()), "{}", chosen.len());
        assert_eq!(chosen, pairwise(&cells), "always the same");
    }
}
