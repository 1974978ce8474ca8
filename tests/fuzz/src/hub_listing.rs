//! A hub's description of a repository: what is chosen of it lies inside a folder and can be checked.

use std::path::{Component, Path};

use penstock_models::{Listing, choose};

pub(crate) fn run(data: &[u8]) {
    let Ok(listing) = Listing::parse(data) else { return };
    assert_eq!(listing.commit.len(), 40);
    for file in &listing.files {
        assert!(Path::new(&file.path).components().all(|part| matches!(part, Component::Normal(_))));
    }
    for quant in [None, Some("Q8_0")] {
        let Ok(choice) = choose(&listing, quant) else { continue };
        let mut names: Vec<_> = choice.files.iter().map(|file| &file.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), choice.files.len(), "one file per name");
        assert!(names.iter().all(|name| !name.contains('/') && !name.ends_with(".bin")));
        assert!(choice.bytes() < u64::MAX);
    }
}
