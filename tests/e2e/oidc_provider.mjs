// A certified OpenID provider (oidc-provider of npm) for the tests of the console's sign-in. The first line on standard output is its issuer;
// POST /test sets what the argument of `set` names, and answers what has happened.
import { generateKeyPairSync } from "node:crypto";
import { createServer } from "node:http";
import Provider from "oidc-provider";

const told = { clients: [], people: {}, conform: true, away: false, turns: 0, access_seconds: 3600 };
const seen = { refreshed: 0, refused: [], revoked: 0, refresh_tokens: [], destroyed: 0 };
let serve;

// One key of each kind, named by the turn that made it.
function keys() {
  const kinds = [["RS256", "rsa", { modulusLength: 2048 }], ["PS256", "rsa", { modulusLength: 2048 }], ["ES256", "ec", { namedCurve: "P-256" }]];
  return kinds.map(([alg, kind, options]) => {
    const { privateKey } = generateKeyPairSync(kind, options);
    return { ...privateKey.export({ format: "jwk" }), alg, use: "sig", kid: `${alg}-${told.turns}` };
  });
}

// Sessions, grants and tokens outlive a provider that is made anew for other keys.
const kept = new Map();
const find = (is) => [...kept.values()].find(is);

class Adapter {
  constructor(name) { this.name = name; }
  async upsert(id, payload) { kept.set(`${this.name}:${id}`, payload); }
  async find(id) { return kept.get(`${this.name}:${id}`); }
  async findByUid(uid) { return find((payload) => payload.kind === this.name && payload.uid === uid); }
  async findByUserCode() {}
  async consume(id) { (await this.find(id)).consumed = Math.floor(Date.now() / 1000); }
  async destroy(id) { kept.delete(`${this.name}:${id}`); }
  async revokeByGrantId(grant) {
    for (const [key, payload] of kept) if (payload.grantId === grant) kept.delete(key);
  }
}

function make(issuer, jwks) {
  const provider = new Provider(issuer, {
    adapter: Adapter,
    // By default the provider calls nobody on loopback, where the gateway is.
    fetch: (url, { dispatcher, ...options }) => fetch(url, options),
    clients: told.clients,
    jwks: { keys: jwks },
    cookies: { keys: ["a key for the tests alone"] },
    scopes: ["openid", "offline_access", "profile", "email", "groups"],
    claims: { openid: ["sub"], profile: ["preferred_username"], email: ["email"], groups: ["groups", "realm_access"] },
    conformIdTokenClaims: told.conform,
    rotateRefreshToken: true,
    ttl: { AccessToken: told.access_seconds, IdToken: 3600, RefreshToken: 86400, Grant: 86400, Session: 86400, Interaction: 3600 },
    features: {
      devInteractions: { enabled: true },
      revocation: { enabled: true },
      rpInitiatedLogout: { enabled: true },
      backchannelLogout: { enabled: true },
    },
    findAccount: (context, id) => {
      const person = told.people[id];
      return person && { accountId: id, claims: () => ({ sub: id, ...person }) };
    },
  });
  provider.on("grant.success", (context) => { if (context.oidc.params.grant_type === "refresh_token") seen.refreshed += 1; });
  provider.on("grant.error", (context, error) => seen.refused.push(`${error.error}: ${error.error_detail ?? error.error_description}`));
  provider.on("refresh_token.saved", (token) => seen.refresh_tokens.push(token.jti));
  provider.on("refresh_token.destroyed", () => { seen.destroyed += 1; });
  provider.on("grant.revoked", () => { seen.revoked += 1; });
  return provider.callback();
}

async function body(request) {
  const parts = [];
  for await (const part of request) parts.push(part);
  return JSON.parse(Buffer.concat(parts).toString() || "{}");
}

let jwks;
const server = createServer(async (request, response) => {
  if (request.url === "/test") {
    const { set } = await body(request);
    Object.assign(told, set);
    if (set?.turns !== undefined) jwks = keys();
    if (set && ("clients" in set || "turns" in set || "conform" in set)) serve = make(server.issuer, jwks);
    response.setHeader("content-type", "application/json");
    return response.end(JSON.stringify(seen));
  }
  if (told.away) {
    response.statusCode = 503;
    return response.end("away");
  }
  return serve(request, response);
});
server.listen(Number(process.argv[2] ?? 0), "127.0.0.1", () => {
  server.issuer = `http://127.0.0.1:${server.address().port}`;
  jwks = keys();
  serve = make(server.issuer, jwks);
  console.log(server.issuer);
});
