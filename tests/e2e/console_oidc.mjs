// People who sign in at the console with the identity provider of the tests, in Debian's Chromium: `node console_oidc.mjs '{"url": …, "issuer": …}'`.

import assert from "node:assert/strict";

import { done, faults, judge, open, shooter } from "./pages.mjs";

const { url, issuer, name, key, shots } = JSON.parse(process.argv[2]);
const shot = shooter(shots);

// Leaves for the provider by a click, and says there who one is.
async function leave(page, who) {
  await page.goto(`${url}/console/`);
  await page.getByRole("button", { name: `Sign in with ${name}` }).click();
  await page.waitForURL(`${issuer}/**`);
  await page.getByRole("link", { name: who }).click();
}

async function isIn(page, person, role) {
  await page.getByRole("navigation", { name: "Views" }).waitFor({ state: "attached" });
  assert.equal(await page.locator(".who strong").textContent(), person);
  assert.equal(await page.locator(".who span").textContent(), role);
  assert.equal(new URL(page.url()).search, "", "the address has forgotten code and state");
}

async function isRefused(page, why) {
  await page.getByRole("alert").waitFor();
  const text = await page.getByRole("alert").textContent();
  assert.ok(text.includes(why), `${text} without ${why}`);
  assert.equal(await page.getByRole("alert").locator("b, img").count(), 0, "text, not markup");
  assert.equal(await page.evaluate(() => localStorage.getItem("penstock.token")), null);
  // The refusal itself is a line in the browser's console.
  assert.equal(faults.filter((fault) => !/status of 403/.test(fault)).length, 0, faults.join("\n"));
  faults.length = 0;
}

// An owner: every view, and the config's editor.
const ada = await open(url, {}, issuer);
await ada.page.goto(`${url}/console/`);
await ada.page.getByRole("button", { name: `Sign in with ${name}` }).waitFor();
await ada.page.getByLabel("Admin key").waitFor();
await judge(ada.page, "sign-in");
await shot(ada.page, "sign-in-oidc");
await leave(ada.page, "ada");
await isIn(ada.page, "ada@corp.example", "owner");
await judge(ada.page, "signed in");
await ada.page.getByRole("link", { name: "Audit" }).click();
await ada.page.getByRole("cell", { name: "oidc:id-of-ada" }).first().waitFor();
await ada.page.reload();
await isIn(ada.page, "ada@corp.example", "owner");
const cookies = await ada.context.cookies([`${url}/admin/v1/session`, `${url}/admin/v1/sign-on/answer`]);
assert.deepEqual(cookies.map((one) => [one.httpOnly, one.sameSite, one.path]), [[true, "Strict", "/admin/v1"]]);
assert.equal(await ada.page.evaluate(() => document.cookie), "");

// A link with somebody else's answer, at a browser with a session: the session stays what it was.
await ada.page.goto(`${url}/console/?code=eves&state=eves`);
await ada.page.getByText("belongs to no sign-in of this browser").waitFor();
await isIn(ada.page, "ada@corp.example", "owner");

// A viewer: no view of owners.
const vic = await open(url, {}, issuer);
await leave(vic.page, "vic");
await isIn(vic.page, "vic@corp.example", "viewer");
assert.equal(await vic.page.getByRole("link", { name: "Audit" }).count(), 0);
await vic.page.getByRole("button", { name: "Sign out" }).click();
await vic.page.getByText("You have signed out.").waitFor();
await vic.page.getByRole("button", { name: `Sign in with ${name}` }).waitFor();
assert.equal(await vic.page.evaluate(() => localStorage.getItem("penstock.token")), null);

// Somebody without a role; the name that the provider gives is markup.
const eve = await open(url, {}, issuer);
await leave(eve.page, "eve");
await isRefused(eve.page, "none of your groups has a role here");
await judge(eve.page, "refused");
await shot(eve.page, "refused-oidc");

// An answer that another browser has asked for, and has not handed over; and an error in the same way.
await eve.page.goto(`${url}/console/`);
await eve.page.getByRole("button", { name: `Sign in with ${name}` }).click();
await eve.page.waitForURL(`${issuer}/**`);
const link = await eve.page.getByRole("link", { name: "ada" }).evaluate((node) => node.href);
const answer = (await fetch(link, { redirect: "manual" })).headers.get("location");
assert.ok(answer.startsWith(`${url}/console/?`), answer);
const other = await open(url, {}, issuer);
await other.page.goto(answer);
await isRefused(other.page, "belongs to no sign-in of this browser");
await other.page.goto(`${url}/console/?error=%3Cb%3Eno%3C%2Fb%3E&error_description=call+us&state=x`);
await isRefused(other.page, "belongs to no sign-in of this browser");
assert.equal(await other.page.getByText("call us").count(), 0, "a link puts no words into the page");

// Also where that browser has the state, as a page of another port may have put it: the cookie is missing.
await other.page.evaluate((state) => localStorage.setItem("penstock.sign-on", state), new URL(answer).searchParams.get("state"));
await other.page.goto(answer);
await isRefused(other.page, "belongs to no sign-in of this browser");

// An admin key beside it signs in as ever.
await other.page.getByLabel("Admin key").fill(key);
await other.page.getByRole("button", { name: "Sign in", exact: true }).click();
await isIn(other.page, "owner", "owner");

await done({ people: 2, refused: 4 });
