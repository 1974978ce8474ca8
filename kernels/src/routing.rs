//! Words of the choice of experts: how they are scored, and the groups among which some are chosen first.

/// Scores of experts, from the logits of their router.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Shares of a softmax over all experts.
    Softmax,
    /// Sigmoid of each logit by itself (DeepSeek-V3). Where the weights are divided by their sum, 1e-20 is added to that.
    Sigmoid,
}

/// Groups of consecutive experts, all of one size. Only experts of the best groups can be chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertGroups {
    /// Number of groups, at most [`ExpertGroups::MAX`].
    pub count: usize,
    /// Number of groups that are chosen.
    pub chosen: usize,
    /// Best experts of a group whose scores are added to be that of the group: 1 (DeepSeek-V2) or 2 (DeepSeek-V3).
    pub best: usize,
}

impl ExpertGroups {
    /// Most groups.
    pub const MAX: usize = 64;
}
