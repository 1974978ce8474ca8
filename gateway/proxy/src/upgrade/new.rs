//! New side of the hand-over: the process that takes over.

use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use super::wire::{Ask, Offer, Tell, UpgradeError, VERSION, Wire};
use crate::fleet::Fleet;
use crate::gateway::Gateway;

/// Longest wait for each message of the old process.
const ANSWER_MAX: Duration = Duration::from_secs(60);

/// Sockets, lock and config that the old process has offered.
pub struct Taken {
    wire: Wire,
    offer: Offer,
    sockets: Vec<Option<OwnedFd>>,
}

/// Asks the gateway of that state folder for its sockets, lock and config.
///
/// # Errors
/// [`UpgradeError`]: there is no gateway, or it refuses.
pub fn take_over(state_dir: &Path) -> Result<Taken, UpgradeError> {
    let mut wire = super::connect(state_dir)?;
    wire.patience(Some(ANSWER_MAX))?;
    wire.send(&Ask::TakeOver { version: VERSION, pid: std::process::id(), takes_holds: true })?;
    let (told, sockets) = wire.receive_with::<Tell>()?;
    match told {
        Tell::Offer(offer) if offer.sockets.len() == sockets.len() => {
            Ok(Taken { wire, offer, sockets: sockets.into_iter().map(Some).collect() })
        }
        Tell::Failed(why) => Err(UpgradeError::Refused(why)),
        _ => Err(UpgradeError::Version),
    }
}

impl Taken {
    /// Digest of the program that the running workers were started from.
    pub fn workers(&self) -> &str {
        &self.offer.workers
    }

    /// Config in force, where it is not the file's.
    pub fn config(&self) -> Option<&str> {
        self.offer.config.as_deref()
    }

    /// Text of the file as the old process last read it, where it is not the config in force.
    pub fn file(&self) -> Option<&str> {
        self.offer.file.as_deref()
    }

    /// Holds the workers that an operator has told the old process to hold.
    pub fn hold(&self, fleet: &Fleet) {
        fleet.hold(&self.offer.held);
    }

    fn socket(&mut self, name: &str) -> Option<OwnedFd> {
        let at = self.offer.sockets.iter().position(|have| have == name)?;
        self.sockets.get_mut(at)?.take()
    }

    /// Takes the descriptor of the state folder's lock, if the old process handed it over.
    pub(super) fn lock(&mut self) -> Option<OwnedFd> {
        self.socket(super::lock::NAME)
    }

    /// Takes the TCP listener that was handed over under `name`; `None`: none was.
    pub fn tcp(&mut self, name: &str) -> Option<TcpListener> {
        self.socket(name).map(TcpListener::from)
    }

    /// Takes the Unix listener that was handed over under `name`; `None`: none was.
    pub fn unix(&mut self, name: &str) -> Option<UnixListener> {
        self.socket(name).map(UnixListener::from)
    }

    /// Tells the old process that this one could serve now, and takes over its counters, and the holds of workers as they are by now.
    ///
    /// # Errors
    /// [`UpgradeError`]: the old process goes on.
    pub fn prepared(mut self, gateway: &Arc<Gateway>, fleet: &Fleet) -> Result<Prepared, UpgradeError> {
        self.wire.send(&Ask::Prepared)?;
        loop {
            match self.wire.receive()? {
                Tell::Holds(held) => fleet.hold(&held),
                Tell::Book(book) => {
                    if let Some(book) = *book {
                        gateway.governor.import(book);
                    }
                    return Ok(Prepared { wire: self.wire, gateway: gateway.clone() });
                }
                Tell::Failed(why) => return Err(UpgradeError::Refused(why)),
                _ => return Err(UpgradeError::Version),
            }
        }
    }
}

/// Hand-over that is complete but for a listener at work.
pub struct Prepared {
    wire: Wire,
    gateway: Arc<Gateway>,
}

impl Prepared {
    /// Tells the old process that this one accepts. Takes in the reservations that the old one settles until it has
    /// ended; `released` is called when the old one has let go of resources that only one process can have.
    pub fn accepting(mut self, released: impl FnOnce() + Send + 'static) {
        if let Err(error) = self.wire.send(&Ask::Accepting).and_then(|()| self.wire.patience(None)) {
            // The old process is gone already; connections come to this one.
            tracing::warn!(%error, "the old process could not be told that this process serves");
        }
        let spawned = std::thread::Builder::new().name("penstock-settle".into()).spawn(move || {
            // Beside: it may wait for an address, and settlements must not.
            let mut released = Some(move || drop(std::thread::spawn(released)));
            loop {
                match self.wire.receive() {
                    Ok(Tell::Held { id, claims }) => self.gateway.governor.adopt(id, &claims),
                    Ok(Tell::Settled { id, amounts }) => self.gateway.governor.settle_adopted(id, &amounts),
                    Ok(Tell::Done { .. }) => released.take().into_iter().for_each(|released| released()),
                    Ok(_) => {}
                    Err(_) => break,
                }
            }
            released.take().into_iter().for_each(|released| released());
            self.gateway.governor.end_adopted();
            tracing::info!("the old process has ended");
        });
        if let Err(error) = spawned {
            tracing::error!(%error, "usage settled by the old process is not received: its requests count with the amounts reserved");
        }
    }
}
