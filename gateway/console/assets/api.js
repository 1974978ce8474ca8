// Calls of the admin API, with the session of this page. The cookie is the browser's; the token is kept for this origin alone.

const TOKEN = "penstock.token";
const SIGN_ON = "penstock.sign-on";
const ROLES = ["viewer", "operator", "owner"];
export const session = { key: "", role: "", person: null };
let left = () => {};
let called = 0;

export class ApiError extends Error {
  constructor(status, error) {
    super(error?.message ?? `The gateway answered ${status}.`);
    this.status = status;
    this.code = error?.code ?? "";
    this.details = error?.details ?? [];
  }
}

export const may = (role) => ROLES.indexOf(session.role) >= ROLES.indexOf(role);
export const onLeft = (act) => (left = act);
const token = () => localStorage.getItem(TOKEN) ?? "";

async function send(method, path, body, more, signal) {
  const headers = { "x-penstock-session": token(), ...more };
  if (body !== undefined) headers["content-type"] = "application/json";
  called = Date.now();
  let answer;
  try {
    answer = await fetch(`/admin/v1${path}`, {
      method, headers, body: body === undefined ? undefined : JSON.stringify(body), credentials: "same-origin", cache: "no-store",
      redirect: "error", signal,
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, { message: "The gateway cannot be reached." });
  }
  if (answer.ok) return answer;
  let error;
  try {
    error = (await answer.json()).error;
  } catch {
    error = null;
  }
  // The session has ended; another's token (403) means the same to this page.
  const isOver = answer.status === 401 || (answer.status === 403 && /token of the session/.test(error?.message ?? ""));
  if (isOver && path !== "/session") forget();
  throw new ApiError(answer.status, error);
}

export async function call(method, path, body, more) {
  const answer = await send(method, path, body, more);
  if (answer.status === 204) return null;
  const found = await answer.json();
  const tag = answer.headers.get("etag");
  return tag ? Object.defineProperty(found, "tag", { value: tag }) : found;
}

export const get = (path, query) => call("GET", withQuery(path, query));
export const post = (path, body) => call("POST", path, body);
export const part = encodeURIComponent;

// Items of a list, page by page: all of them, or the first `most`.
export async function all(path, query, most = 20_000) {
  const items = [];
  for (let after; ; ) {
    const page = await get(path, { limit: 1000, ...query, after });
    items.push(...page.data);
    after = page.next;
    if (!after || items.length >= most) return items;
  }
}

// A CSV of all pages, as its parts, with one line of names.
export async function csv(path, query) {
  const parts = [];
  for (let after; ; ) {
    const answer = await send("GET", withQuery(path, { limit: 1000, ...query, after }));
    const page = await answer.text();
    parts.push(parts.length ? page.slice(page.indexOf("\n") + 1) : page);
    after = answer.headers.get("x-next");
    if (!after) return parts;
  }
}

// Server-sent events of a body as they come: { name, data } of each, { comment } of a comment. Lines may end in LF, CRLF or CR.
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let [held, name, data] = ["", "", []];
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      // A CR at the end may be the first half of a CRLF.
      const lines = (held + value).split(/\r\n|\n|\r(?!$)/);
      held = lines.pop();
      for (const line of lines) {
        const [, field, text] = /^([^:]*)(?:: ?)?(.*)$/s.exec(line);
        if (line === "") {
          if (data.length) yield { name, data: data.join("\n") };
          [name, data] = ["", []];
        } else if (field === "") {
          yield { comment: text.trim() };
        } else if (field === "event") {
          name = text;
        } else if (field === "data") {
          data.push(text);
        }
      }
    }
  } finally {
    // Who reads no further closes the connection.
    reader.cancel().catch(() => {});
  }
}

// Events of a stream that a POST answers with: `tell` gets the data of each, `aside` the comments. Aborting `signal` ends it.
export async function stream(path, body, signal, tell, aside) {
  const answer = await send("POST", path, body, { accept: "text/event-stream" }, signal);
  for await (const { name, data, comment } of events(answer.body)) {
    if (name === "end") {
      forget();
      return;
    }
    if (comment !== undefined) aside(comment);
    else if (data !== "[DONE]") {
      const found = JSON.parse(data);
      if (found.error) throw new ApiError(0, found.error);
      tell(found);
    }
  }
}

function withQuery(path, query) {
  const pairs = Object.entries(query ?? {}).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return pairs.length ? `${path}?${new URLSearchParams(pairs)}` : path;
}

function opened(found) {
  localStorage.setItem(TOKEN, found.token);
  known(found);
}

const known = (found) => Object.assign(session, { key: found.key, role: found.role, person: found.person });

export async function signIn(key) {
  opened(await call("POST", "/session", { key }));
}

// Name of the identity provider that people can sign in with; null without one.
export const provider = async () => (await get("/sign-on")).provider;

// Leaves for the identity provider, which sends the browser back here with an answer.
export async function leaveToSignOn() {
  const begun = await call("POST", "/sign-on");
  localStorage.setItem(SIGN_ON, begun.state);
  location.assign(begun.url);
}

// Answer of the identity provider in the page's address, which then forgets it; null without one.
export function answered() {
  const query = new URLSearchParams(location.search);
  if (!query.has("state") || !(query.has("code") || query.has("error"))) return null;
  history.replaceState(null, "", location.pathname);
  const parts = ["code", "state", "iss", "error", "error_description"].filter((name) => query.has(name));
  return Object.fromEntries(parts.map((name) => [name, query.get(name)]));
}

// The state is kept for this origin alone: an answer that a link or a page of another port brings is not taken.
export async function signOn(answer) {
  if (answer.state !== localStorage.getItem(SIGN_ON)) {
    throw new ApiError(403, { message: "This answer belongs to no sign-in of this browser: sign in again." });
  }
  localStorage.removeItem(SIGN_ON);
  opened(await call("POST", "/sign-on/answer", answer));
}

// Whether this browser has a session that still stands.
export async function resume() {
  if (!token()) return false;
  try {
    known(await call("GET", "/session"));
    return true;
  } catch (error) {
    if (error.status === 401 || error.status === 403) localStorage.removeItem(TOKEN);
    return false;
  }
}

export async function signOut() {
  try {
    // Where the gateway is told to, the way out leads through the identity provider and back.
    const left = await call("DELETE", "/session");
    if (left?.url) location.assign(left.url);
  } finally {
    forget("You have signed out.");
  }
}

function forget(why = "Your session has ended. Sign in again.") {
  localStorage.removeItem(TOKEN);
  Object.assign(session, { key: "", role: "", person: null });
  left(why);
}

// Another tab has signed out, or in with another key.
addEventListener("storage", (event) => {
  if (event.key === TOKEN && session.role) left("The session was changed in another tab.");
});

// Who works with the page keeps the session; a page that is only looked at does not.
const AWAKE_MS = 5 * 60 * 1000;
for (const event of ["pointerdown", "keydown"]) {
  addEventListener(event, () => {
    if (session.role && Date.now() - called > AWAKE_MS) call("GET", "/session").catch(() => {});
  }, { passive: true });
}

// A gateway that says nothing for so long cannot be called live: a cable that was pulled ends no connection.
const SILENCE_MS = 6000;

// Follows the live state until `stop()`: `tell(state)` for each event, `state` of the connection by `is(text)`. One stream at a time is read,
// and none while nobody sees the page.
export function follow(tell, is) {
  let current = null;
  let stopped = false;
  let pause = 1000;
  let timer = 0;

  function end() {
    clearTimeout(timer);
    current?.abort();
    current = null;
  }

  async function read() {
    end();
    if (stopped || document.hidden) return;
    const mine = new AbortController();
    current = mine;
    let watch = 0;
    const heard = () => {
      clearTimeout(watch);
      watch = setTimeout(() => mine.abort(), SILENCE_MS);
    };
    let after = 200;
    heard();
    try {
      const headers = { accept: "text/event-stream", "x-penstock-session": token() };
      const answer = await fetch("/admin/v1/live", { headers, signal: mine.signal, credentials: "same-origin", cache: "no-store" });
      if (answer.status === 401 || answer.status === 403) {
        forget();
        return;
      }
      if (answer.status === 429) {
        is("paused: too many pages of the console are open");
        after = 10_000;
      } else if (answer.ok) {
        for await (const { name, data } of events(answer.body)) {
          if (mine !== current) return;
          heard();
          if (name === "end") {
            forget();
            return;
          }
          if (data === undefined) continue;
          pause = 1000;
          is("");
          tell(JSON.parse(data));
        }
      } else {
        throw new Error(String(answer.status));
      }
    } catch {
      if (mine === current) is("reconnecting");
      after = pause;
      pause = Math.min(10_000, pause * 2);
    } finally {
      clearTimeout(watch);
    }
    if (mine === current) timer = setTimeout(read, after);
  }

  // A page that nobody sees asks for nothing.
  const seen = () => (document.hidden ? end() : read());
  document.addEventListener("visibilitychange", seen);
  read();
  return () => {
    stopped = true;
    document.removeEventListener("visibilitychange", seen);
    end();
  };
}
