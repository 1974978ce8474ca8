//! Teams and users at the desk: made, changed, removed, with everything that is checked before it is done.

use penstock_store::{Listing, OwnerChange, OwnerKind, OwnerRecord, Page, StoreError};

use super::desk::{Desk, DeskError, check_scope, invalid, text, texts};

impl Desk {
    /// Makes a team or a user; `version` and `removed` of what is given do not matter.
    ///
    /// # Errors
    /// What is wrong with it; [`DeskError::Taken`] where the config or the store has one of that id.
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

    /// Changes a team or a user. Blocked, nothing of it is served.
    ///
    /// # Errors
    /// There is no such one in the store, or it would be what it may not.
    pub async fn change_owner(&self, kind: OwnerKind, id: &str, change: OwnerChange) -> Result<OwnerRecord, DeskError> {
        let mut owner = self.owner(kind, id).await?;
        change.clone().apply(&mut owner);
        self.check_owner(&owner).await?;
        let changed = self.store.update_owner(kind, id, change).await?;
        changed.ok_or_else(|| DeskError::NotFound(id.to_owned()))
    }

    /// Removes a team or a user. Keys of a team that is gone are not good any more.
    ///
    /// # Errors
    /// There is no such one in the store.
    pub async fn remove_owner(&self, kind: OwnerKind, id: &str, now: u64) -> Result<(), DeskError> {
        let removed = self.store.remove_owner(kind, id, now).await?;
        if removed { Ok(()) } else { Err(DeskError::NotFound(id.to_owned())) }
    }

    /// One team or user of the store.
    ///
    /// # Errors
    /// There is no such one.
    pub async fn owner(&self, kind: OwnerKind, id: &str) -> Result<OwnerRecord, DeskError> {
        self.store.owner(kind, id).await?.ok_or_else(|| DeskError::NotFound(id.to_owned()))
    }

    /// Teams or users of the store, in the order of their ids; `team`: users of that team.
    ///
    /// # Errors
    /// The store's.
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
