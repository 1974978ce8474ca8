//! Teams and users at the desk: creation, change and removal, with all of their validation.

use penstock_store::{Listing, OwnerChange, OwnerKind, OwnerRecord, Page, StoreError};

use super::key_issuing::{Desk, DeskError, check_scope, invalid, text, texts};

impl Desk {
    /// Creates a team or a user; `version` and `removed` of `owner` are ignored.
    ///
    /// # Errors
    /// An invalid field, or [`DeskError::Taken`] if the config or the store has one with that id.
    pub async fn create_owner(&self, owner: OwnerRecord) -> Result<OwnerRecord, DeskError> {
        if owner.id.is_empty() || owner.id.contains(':') {
            return Err(invalid("id", "must not be empty, and have no colon"));
        }
        text("id", &owner.id)?;
        self.check_owner(&owner).await?;
        let id = owner.id.clone();
        if owner.kind == OwnerKind::Team && self.in_file(&id) {
            return Err(DeskError::Taken(id));
        }
        self.store.create_owner(owner).await?.ok_or(DeskError::Taken(id))
    }

    /// Changes a team or a user. Requests of a blocked one are refused.
    ///
    /// # Errors
    /// The store has no such team or user, or the changed one would be invalid.
    pub async fn change_owner(&self, kind: OwnerKind, id: &str, change: OwnerChange) -> Result<OwnerRecord, DeskError> {
        let mut owner = self.owner(kind, id).await?;
        change.clone().apply(&mut owner);
        self.check_owner(&owner).await?;
        let changed = self.store.update_owner(kind, id, change).await?;
        changed.ok_or_else(|| DeskError::NotFound(id.to_owned()))
    }

    /// Removes a team or a user. Keys of a removed team are refused.
    ///
    /// # Errors
    /// The store has no such team or user.
    pub async fn remove_owner(&self, kind: OwnerKind, id: &str, now: u64) -> Result<(), DeskError> {
        let removed = self.store.remove_owner(kind, id, now).await?;
        if removed { Ok(()) } else { Err(DeskError::NotFound(id.to_owned())) }
    }

    /// Reads one team or user of the store.
    ///
    /// # Errors
    /// The store has no such team or user.
    pub async fn owner(&self, kind: OwnerKind, id: &str) -> Result<OwnerRecord, DeskError> {
        self.store.owner(kind, id).await?.ok_or_else(|| DeskError::NotFound(id.to_owned()))
    }

    /// Lists teams or users of the store in the order of their ids; `team` keeps only users of that team.
    ///
    /// # Errors
    /// The store fails.
    pub async fn owners(
        &self,
        kind: OwnerKind,
        team: Option<&str>,
        page: &Page,
    ) -> Result<Listing<OwnerRecord>, StoreError> {
        self.store.owners(kind, team, page).await
    }

    async fn check_owner(&self, owner: &OwnerRecord) -> Result<(), DeskError> {
        text("name", &owner.name)?;
        check_scope(&owner.scope)?;
        texts("limits", &owner.limits)?;
        self.check_limits(&owner.limits)?;
        texts("budgets", &owner.budgets)?;
        texts("tags", &owner.tags)?;
        match (&owner.team, owner.kind) {
            (Some(_), OwnerKind::Team) => Err(invalid("team", "a team is in no team")),
            (Some(team), OwnerKind::User) => self.check_team(team).await,
            (None, _) => Ok(()),
        }
    }
}
