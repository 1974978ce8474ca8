//! Harness that starts and ends database servers.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use penstock_store::{Postgres, PostgresOptions, Redis, RedisOptions};

use crate::relay::Relay;

/// Longest time in which a server must accept connections after its start.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Password that must appear in no error and no log of a test.
pub(crate) const PASSWORD: &str = "s3cret-pässword";

/// Folder that is removed with its test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        // Short, since a Unix socket's path has at most 107 bytes.
        let path = PathBuf::from(format!("/tmp/penstock-{name}-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).expect("a folder");
        Self(path)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Server process; it ends with the test, even if the test is killed.
struct Server {
    child: Child,
}

impl Server {
    fn start(program: &Path, user: Option<&str>, arguments: &[String], log: &Path) -> Self {
        let log = std::fs::File::create(log).expect("a log");
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL"]);
        if let Some(user) = user {
            command.args(["--reuid", user, "--regid", user, "--init-groups"]);
        }
        command.arg(program).args(arguments).stdin(Stdio::null());
        command.stdout(log.try_clone().expect("a log")).stderr(log);
        Self { child: command.spawn().expect("setpriv is part of util-linux") }
    }

    /// Ids of the process and its children: PostgreSQL has one child per connection.
    fn pids(&self) -> Vec<u32> {
        let own = self.child.id();
        let listed = run(Command::new("ps").args(["-o", "pid=", "--ppid", &own.to_string()]));
        let children = String::from_utf8_lossy(&listed.stdout)
            .split_whitespace()
            .map(|pid| pid.parse().expect("a pid"))
            .collect::<Vec<u32>>();
        [vec![own], children].concat()
    }

    fn signal(&self, signal: &str) {
        for pid in self.pids() {
            // A child may have ended meanwhile.
            run(Command::new("kill").args([format!("-{signal}"), pid.to_string()]));
        }
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.signal("CONT");
        run(Command::new("kill").args(["-INT", &self.child.id().to_string()]));
        let end = Instant::now() + Duration::from_secs(10);
        while Instant::now() < end {
            if let Ok(Some(_)) = self.child.try_wait() {
                return;
            }
            std::thread::yield_now();
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn run(command: &mut Command) -> Output {
    command.stdin(Stdio::null()).output().unwrap_or_else(|error| panic!("{command:?}: {error}"))
}

/// Finds a program on the path, or where Debian keeps PostgreSQL's.
fn find(name: &str) -> PathBuf {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut folders: Vec<PathBuf> = std::fs::read_dir("/usr/lib/postgresql")
        .map(|versions| versions.flatten().map(|version| version.path().join("bin")).collect())
        .unwrap_or_default();
    folders.sort();
    folders.reverse();
    folders.extend(std::env::split_paths(&path));
    let found = folders.into_iter().map(|folder| folder.join(name)).find(|program| program.is_file());
    found.unwrap_or_else(|| {
        panic!("{name} is not installed: `make test-stores` installs it (Debian packages postgresql and redis-server)")
    })
}

fn is_root() -> bool {
    use std::os::unix::fs::MetadataExt;
    std::fs::metadata("/proc/self").expect("a process").uid() == 0
}

/// Waits until a server accepts connections.
fn until(what: &str, log: &Path, mut ready: impl FnMut() -> bool) {
    let end = Instant::now() + START_TIMEOUT;
    while !ready() {
        let said = || std::fs::read_to_string(log).unwrap_or_default();
        assert!(Instant::now() < end, "{what} did not start:\n{}", said());
        std::thread::yield_now();
    }
}

/// PostgreSQL server of one test; it ends with the value.
pub(crate) struct PostgresServer {
    server: Option<Server>,
    folder: Folder,
}

impl PostgresServer {
    /// Initializes and starts an empty server.
    pub(crate) fn start(name: &str) -> Self {
        let folder = Folder::new(name);
        let (data, secret) = (folder.0.join("data"), folder.0.join("password"));
        std::fs::write(&secret, PASSWORD).expect("written");
        let mut initdb = Command::new("setpriv");
        if is_root() {
            // PostgreSQL does not run as root.
            assert!(
                run(Command::new("chown").args(["-R", "postgres:"]).arg(&folder.0)).status.success(),
                "user postgres"
            );
            initdb.args(["--reuid", "postgres", "--regid", "postgres", "--init-groups"]);
        }
        initdb.arg(find("initdb")).args([
            "-U",
            "penstock",
            "-A",
            "scram-sha-256",
            "--encoding=UTF8",
            "--locale=C.UTF-8",
            "-N",
        ]);
        let made = run(initdb.arg("--pwfile").arg(&secret).arg("-D").arg(&data));
        assert!(made.status.success(), "{}", String::from_utf8_lossy(&made.stderr));
        let mut this = Self { server: None, folder };
        this.restart();
        this
    }

    /// Starts the server again on the same data.
    pub(crate) fn restart(&mut self) {
        self.server = None;
        let (folder, log) = (self.folder.0.display(), self.folder.0.join("log"));
        let settings = [
            "listen_addresses=".to_owned(),
            format!("unix_socket_directories={folder}"),
            "fsync=off".into(),
            "shared_buffers=16MB".into(),
            "max_connections=40".into(),
        ];
        let mut arguments = vec!["-D".to_owned(), format!("{folder}/data")];
        arguments.extend(settings.into_iter().flat_map(|setting| ["-c".into(), setting]));
        let user = is_root().then_some("postgres");
        self.server = Some(Server::start(&find("postgres"), user, &arguments, &log));
        let socket = self.folder.0.clone();
        until("PostgreSQL", &log, || {
            run(Command::new(find("pg_isready")).arg("-q").arg("-h").arg(&socket)).status.success()
        });
    }

    /// Kills the server, as a power loss would.
    pub(crate) fn kill(&mut self) {
        if let Some(server) = &self.server {
            server.signal("KILL");
        }
        self.server = None;
    }

    /// Suspends the server, or resumes it.
    pub(crate) fn hang(&self, hangs: bool) {
        if let Some(server) = &self.server {
            server.signal(if hangs { "STOP" } else { "CONT" });
        }
    }

    /// Options for connecting to the server without the relay.
    pub(crate) fn options(&self, connections: usize) -> PostgresOptions {
        Self::at(&self.folder.0, connections)
    }

    /// Options for a connection through a relay.
    pub(crate) fn relayed(&self, connections: usize) -> (Relay, PostgresOptions) {
        let (folder, socket) = (self.folder.0.join("relay"), ".s.PGSQL.5432");
        std::fs::create_dir(&folder).expect("a folder");
        let relay = Relay::start(&folder.join(socket), &self.folder.0.join(socket));
        (relay, Self::at(&folder, connections))
    }

    fn at(folder: &Path, connections: usize) -> PostgresOptions {
        let password: String = PASSWORD.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let host = folder.display().to_string().replace('/', "%2f");
        PostgresOptions { url: format!("postgres://penstock:{password}@{host}/postgres"), tls: None, connections }
    }

    /// Opens a store on the server, as a gateway does.
    pub(crate) async fn open(&self, connections: usize) -> Postgres {
        Postgres::open(&self.options(connections)).await.expect("opens")
    }
}

/// Redis server of one test; it ends with the value.
pub(crate) struct RedisServer {
    server: Option<Server>,
    folder: Folder,
}

impl RedisServer {
    /// Starts a server without data.
    pub(crate) fn start(name: &str) -> Self {
        let mut this = Self { server: None, folder: Folder::new(name) };
        this.restart();
        this
    }

    /// Starts the server again, without its data.
    pub(crate) fn restart(&mut self) {
        self.server = None;
        let (socket, log) = (self.folder.0.join("socket"), self.folder.0.join("log"));
        let _ = std::fs::remove_file(&socket);
        let settings =
            format!("port 0\nunixsocket {}\nsave \"\"\nappendonly no\nrequirepass {PASSWORD}\n", socket.display());
        let file = self.folder.0.join("redis.conf");
        std::fs::write(&file, settings).expect("written");
        let arguments = [file.display().to_string()];
        self.server = Some(Server::start(&find("redis-server"), None, &arguments, &log));
        until("Redis", &log, || std::os::unix::net::UnixStream::connect(&socket).is_ok());
    }

    /// Kills the server's process, as a crash would.
    pub(crate) fn kill(&mut self) {
        if let Some(server) = &self.server {
            server.signal("KILL");
        }
        self.server = None;
    }

    /// Suspends the server, or resumes it.
    pub(crate) fn hang(&self, hangs: bool) {
        if let Some(server) = &self.server {
            server.signal(if hangs { "STOP" } else { "CONT" });
        }
    }

    /// Runs a command on the server, as its operator would.
    pub(crate) fn command(&self, words: &[&str]) {
        let mut command = Command::new(find("redis-cli"));
        command.arg("-s").arg(self.folder.0.join("socket")).args(["-a", PASSWORD, "--no-auth-warning"]).args(words);
        let done = run(&mut command);
        assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stdout));
    }

    /// Options for connecting to the server without the relay.
    pub(crate) fn options(&self, prefix: &str) -> RedisOptions {
        Self::at(&self.folder.0.join("socket"), prefix)
    }

    /// Options for a connection through a relay.
    pub(crate) fn relayed(&self, prefix: &str) -> (Relay, RedisOptions) {
        let path = self.folder.0.join("relay");
        (Relay::start(&path, &self.folder.0.join("socket")), Self::at(&path, prefix))
    }

    fn at(socket: &Path, prefix: &str) -> RedisOptions {
        let password: String = PASSWORD.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let url = format!("redis+unix://{}?pass={password}", socket.display());
        RedisOptions { url, prefix: prefix.to_owned(), ca: None }
    }

    /// Opens a connection to the server, as a gateway does.
    pub(crate) async fn open(&self, prefix: &str) -> Redis {
        Redis::open(&self.options(prefix)).await.expect("opens")
    }
}
