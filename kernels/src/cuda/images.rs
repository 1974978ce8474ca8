//! Kernels as the binary carries them: compressed cubins per architecture, made by `kernels/kernelc`.

use flate2::read::GzDecoder;
use std::io::Read;

/// Manifest of the cubins, written by `kernels/kernelc`; a test of that crate compares it with them.
const MANIFEST: &str = include_str!("../../cuda/prebuilt/manifest.toml");

/// Architecture for which there are cubins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Architecture {
    /// Compute capability 8.0, 8.6 and 8.9: A100, RTX 30 and 40, L4.
    Sm80,
    /// Compute capability 9.0: H100, H200.
    Sm90a,
    /// Compute capability 10.0: B200.
    Sm100a,
    /// Compute capability 12.0: RTX 50.
    Sm120a,
}

macro_rules! images {
    ($architecture:literal, $groups:expr) => {
        Images {
            groups: $groups,
            rows: include_bytes!(concat!("../../cuda/prebuilt/", $architecture, "/rows.cubin.gz")),
            gemm: include_bytes!(concat!("../../cuda/prebuilt/", $architecture, "/gemm.cubin.gz")),
            attention: include_bytes!(concat!("../../cuda/prebuilt/", $architecture, "/attention.cubin.gz")),
            sampling: include_bytes!(concat!("../../cuda/prebuilt/", $architecture, "/sampling.cubin.gz")),
        }
    };
}

/// Compressed cubins of one architecture, by their source.
pub(super) struct Images {
    pub(super) rows: &'static [u8],
    pub(super) gemm: &'static [u8],
    pub(super) groups: Option<Groups>,
    pub(super) attention: &'static [u8],
    pub(super) sampling: &'static [u8],
}

/// Compressed cubins of what the matrix instructions of four warps compute.
pub(super) struct Groups {
    pub(super) products: &'static [u8],
    /// Products where a group copies for the others.
    pub(super) fed: &'static [u8],
    pub(super) attention: &'static [u8],
}

impl Architecture {
    /// Architecture whose code runs on a device of this compute capability. Code for 9.0a, 10.0a and 12.0a runs on that capability alone, and code for 8.0
    /// on no part of a system on a chip (8.7: Jetson Orin), which loads none that was made for cards.
    pub(super) fn of(capability: (i32, i32)) -> Option<Self> {
        match capability {
            (8, 0 | 6 | 9) => Some(Self::Sm80),
            (9, 0) => Some(Self::Sm90a),
            (10, 0) => Some(Self::Sm100a),
            (12, 0) => Some(Self::Sm120a),
            _ => None,
        }
    }

    /// Name, as the compiler has it.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Sm80 => "sm_80",
            Self::Sm90a => "sm_90a",
            Self::Sm100a => "sm_100a",
            Self::Sm120a => "sm_120a",
        }
    }

    /// True if kernels wait for the one before them, so that they may begin while it ends: from compute capability 9.0 on.
    pub(super) fn overlaps(self) -> bool {
        self != Self::Sm80
    }

    /// True if the manifest says of each kernel for this architecture that it has been measured on a GPU.
    pub(super) fn is_measured(self) -> bool {
        are_measured(MANIFEST, self.name())
    }

    pub(super) fn images(self) -> Images {
        match self {
            Self::Sm80 => images!("sm_80", None),
            Self::Sm90a => {
                let products = include_bytes!("../../cuda/prebuilt/sm_90a/wgmma.cubin.gz");
                let fed = include_bytes!("../../cuda/prebuilt/sm_90a/wgmma_fed.cubin.gz");
                let attention = include_bytes!("../../cuda/prebuilt/sm_90a/wgmma_attention.cubin.gz");
                images!("sm_90a", Some(Groups { products, fed, attention }))
            }
            Self::Sm100a => images!("sm_100a", None),
            Self::Sm120a => images!("sm_120a", None),
        }
    }
}

/// True if a manifest has kernels for an architecture and all of them have been measured.
fn are_measured(manifest: &str, architecture: &str) -> bool {
    let mut all = statuses(manifest, architecture).peekable();
    all.peek().is_some() && all.all(|status| status.starts_with("measured "))
}

/// Statuses of the kernels of an architecture, in the manifest's order. Sections are cubins; a cubin's kernels follow its header.
fn statuses<'m>(manifest: &'m str, architecture: &str) -> impl Iterator<Item = &'m str> {
    let header = format!("architecture = \"{architecture}\"");
    let cubins = manifest.split("[[cubin]]").filter(move |cubin| cubin.contains(&header));
    cubins.flat_map(str::lines).filter_map(|line| line.strip_prefix("status = \"")?.strip_suffix('"'))
}

/// Unpacks a cubin of this binary.
pub(super) fn unpack(image: &[u8]) -> Vec<u8> {
    let mut cubin = Vec::new();
    GzDecoder::new(image).read_to_end(&mut cubin).expect("committed cubins are whole, as a test of kernelc says");
    cubin
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_image_is_an_elf_file() {
        for architecture in [Architecture::Sm80, Architecture::Sm90a, Architecture::Sm100a, Architecture::Sm120a] {
            let Images { rows, gemm, groups, attention, sampling } = architecture.images();
            let groups = groups.into_iter().flat_map(|groups| [groups.products, groups.fed, groups.attention]);
            for image in [rows, gemm, attention, sampling].into_iter().chain(groups) {
                assert!(unpack(image).starts_with(b"\x7fELF"), "{}", architecture.name());
            }
        }
    }

    #[test]
    fn statuses_are_those_of_the_architecture() {
        let cubin = |architecture: &str, statuses: [&str; 2]| {
            let kernels = statuses.map(|status| format!("[[cubin.kernel]]\nname = \"k\"\nstatus = \"{status}\"\n"));
            format!("[[cubin]]\nsource = \"rows.cu\"\narchitecture = \"{architecture}\"\n{}", kernels.concat())
        };
        let (measured, model) = ("measured 2027-01-01", "model-only");
        let manifest = [
            cubin("sm_80", [measured, model]),
            cubin("sm_90a", [measured, measured]),
            cubin("sm_80", [measured, measured]),
            cubin("sm_120a", [model, model]),
        ]
        .concat();
        let found = |name: &str| statuses(&manifest, name).collect::<Vec<_>>();
        assert_eq!(found("sm_80"), [measured, model, measured, measured]);
        let are = ["sm_80", "sm_90a", "sm_120a", "sm_100a"].map(|name| are_measured(&manifest, name));
        assert_eq!(are, [false, true, false, false], "one of model-only decides, and none is not all");
    }

    #[test]
    fn the_manifest_has_the_same_kernels_for_each_architecture() {
        let lengths = ["sm_80", "sm_90a", "sm_100a", "sm_120a"].map(|name| statuses(MANIFEST, name).count());
        // What groups of warps compute, products by six kernels and attention by two, is there for one of them.
        let others = [lengths[0], lengths[2], lengths[3]];
        assert!(lengths[0] > 6 && others == [lengths[0]; 3] && lengths[1] == lengths[0] + 17, "{lengths:?}");
    }

    #[test]
    fn capabilities_find_their_architecture() {
        let names = [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0), (12, 1)]
            .map(|capability| Architecture::of(capability).map(Architecture::name));
        let (old, orin, new) = (Some("sm_80"), None, None);
        assert_eq!(names, [None, old, old, orin, old, Some("sm_90a"), Some("sm_100a"), new, Some("sm_120a"), new]);
    }
}
