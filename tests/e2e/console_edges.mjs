// A person at the console where answers fail, are long, or come in other forms: `node console_edges.mjs '{"url": …, "key": …}'`. Answers of the
// admin API are put in place of the gateway's own where the gateway would need thousands of users, or days, to give them.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";

import { done, faults, judge, open, shooter, signIn, view } from "./pages.mjs";

const { url, key, id, expires, shots } = JSON.parse(process.argv[2]);
const shot = shooter(shots);
// West of Greenwich, where the day of a midnight in UTC is the day before.
const { page } = await open(url, { timezoneId: "America/New_York", acceptDownloads: true });
await page.addInitScript(() => {
  Object.defineProperty(document, "hidden", { get: () => sessionStorage.getItem("unseen") === "yes" });
});
const see = (seen) => page.evaluate((is) => {
  sessionStorage.setItem("unseen", is ? "no" : "yes");
  document.dispatchEvent(new Event("visibilitychange"));
}, seen);
const wait = (ms) => new Promise((over) => setTimeout(over, ms));
const json = (body, status = 200) => (route) => route.fulfill({ status, contentType: "application/json", body: JSON.stringify(body) });
const refused = json({ error: { message: "Out of order." } }, 503);
const only = (method, answer) => (route) => (route.request().method() === method ? answer(route) : route.fallback());
// Answer of the admin API to the person who has signed in.
const ask = (path) => page.evaluate(async (place) => {
  const answer = await fetch(`/admin/v1${place}`, { headers: { "x-penstock-session": localStorage.getItem("penstock.token") } });
  return answer.json();
}, path);

// Streams of the live state that this page reads.
const streams = new Set();
let begun = 0;
page.on("request", (request) => {
  if (!request.url().endsWith("/admin/v1/live")) return;
  begun += 1;
  streams.add(request);
});
for (const end of ["requestfinished", "requestfailed"]) page.on(end, (request) => streams.delete(request));

await signIn(page, url, key);
await page.getByText("live", { exact: true }).waitFor();
assert.equal(streams.size, 1);
for (let turn = 0; turn < 3; turn += 1) {
  await see(false);
  await see(true);
}
// Seen twice in a row, as some browsers tell it.
await see(true);
await wait(2500);
assert.equal(streams.size, 1, "one stream, however often the page was hidden");
await page.getByText("live", { exact: true }).waitFor();
await see(false);
await wait(500);
assert.equal(streams.size, 0, "none while nobody sees the page");
begun = 0;
await page.reload();
await page.getByRole("navigation", { name: "Views" }).waitFor({ state: "attached" });
await wait(1500);
assert.equal(begun, 0, "none in a page that begins unseen");
await see(true);
await page.getByText("live", { exact: true }).waitFor();
assert.equal(streams.size, 1);

// Days are those of the sums.
const before = new Date().toISOString().slice(0, 10);
await view(page, "usage");
await page.getByRole("heading", { name: "Output tokens by day (UTC)" }).waitFor();
const last = await page.locator("svg.bars title").last().textContent();
assert.ok([before, new Date().toISOString().slice(0, 10)].includes(last.slice(0, 10)), last);

// A CSV of two pages.
await page.route(/\/v1\/usage\.csv\?/, (route) => {
  const after = new URL(route.request().url()).searchParams.get("after");
  const body = `day,model,usd\r\n${after === "further" ? "2,b" : "1,a"},0\r\n`;
  return route.fulfill({ contentType: "text/csv", body, headers: after ? {} : { "x-next": "further" } });
});
const [download] = await Promise.all([page.waitForEvent("download"), page.getByRole("button", { name: "Download CSV" }).click()]);
assert.equal(readFileSync(await download.path(), "utf8"), "day,model,usd\r\n1,a,0\r\n2,b,0\r\n");

// More users than a page of sums has, before the first key.
const sums = { requests: 7, failed: 0, input_tokens: 0, input_cached_tokens: 0, output_tokens: 0, reasoning_tokens: 0, usd: 1.5 };
await page.route(/\/v1\/usage\?/, (route) => {
  const query = new URL(route.request().url()).searchParams;
  if (query.get("group") !== "key") return route.fallback();
  const users = Array.from({ length: 1000 }, (_, at) => ({ ...sums, groups: { key: `jwt:${at}` } }));
  if (!query.has("after")) return json({ data: users, next: "WyJqd3Q6OTk5Il0" })(route);
  const [group] = JSON.parse(Buffer.from(query.get("after"), "base64url").toString());
  return json(group < id ? { data: [{ ...sums, groups: { key: id } }], next: null } : { data: [], next: null })(route);
});
await view(page, "keys");
const row = page.getByRole("row", { name: "edge" });
await row.waitFor();
assert.deepEqual([await row.locator("td").nth(6).textContent(), await row.locator("td").nth(7).textContent()], ["7", "$1.50"]);
await page.unroute(/\/v1\/usage\?/);
// The gateway itself takes the place from which the sums are asked for.
await page.waitForFunction(async () => {
  dispatchEvent(new HashChangeEvent("hashchange"));
  await new Promise((over) => setTimeout(over, 300));
  return document.querySelector("tbody tr td:nth-child(8)")?.textContent === "1";
}, undefined, { polling: 500 });

// A limit that a team shares is told as the team's.
const details = async () => {
  await page.getByRole("button", { name: "Details of edge" }).click();
  await page.getByText("shared: 9 of 10 requests per day left (counted by team)").waitFor();
};
await details();
await judge(page, "details of a shared limit");

// Without the limits there is nothing to change.
await page.route(/\/v1\/limits\?/, refused);
await page.getByRole("button", { name: "Change" }).click();
await page.getByText("Out of order.").waitFor();
assert.equal(await page.getByRole("dialog").count(), 0);
await page.unroute(/\/v1\/limits\?/);

// A limit that this gateway does not have stays, as does a moment of expiry that nobody touches.
await page.route(/\/v1\/limits\?/, json({ data: [], next: null }));
await details();
await page.getByRole("button", { name: "Change" }).click();
// The uppermost one.
const form = page.getByRole("dialog").last();
await form.getByLabel("shared").waitFor();
assert.ok(await form.getByLabel("shared").isChecked());
await form.getByText("not in this gateway's config").waitFor();
assert.equal(await page.locator("[id]").evaluateAll((all) => all.length - new Set(all.map((one) => one.id)).size), 0, "ids are used once");
assert.ok((await form.getByLabel("Team").locator("option").allTextContents()).includes("in-the-file"), "a team of the config");
await form.getByLabel("Tags").fill("edge");
await form.getByRole("button", { name: "Change" }).click();
await page.getByText("The key is changed.").waitFor();
const changed = await ask(`/keys/${id}`);
assert.deepEqual([changed.limits, changed.expires, changed.tags, changed.team], [["shared"], expires, ["edge"], "in-the-file"]);
await page.unroute(/\/v1\/limits\?/);

// A budget is taken back where its key is not issued, and told where a restart forgets it.
const issue = async () => {
  await form.getByRole("button", { name: "Issue", exact: true }).click();
};
await page.getByRole("button", { name: "Issue a key" }).click();
await form.getByText(/This gateway does not write its config file/).waitFor();
await form.getByLabel("Name").fill("It's \"mine\"");
await form.getByLabel("Models").fill("care*");
await form.getByLabel("Amount").fill("5");
await judge(page, "issue with a warning");
await shot(page, "issue-warning", false);
const post = only("POST", refused);
await page.route(/\/v1\/keys$/, post);
await issue();
await form.getByRole("alert").waitFor();
assert.equal(await form.getByRole("alert").textContent(), "Out of order.");
assert.deepEqual((await ask("/config/limits")).data.map((one) => one.id), ["standard", "shared"]);
await page.unroute(/\/v1\/keys$/, post);
await issue();
const lines = await page.getByRole("region", { name: "For the config file" }).textContent();
assert.match(lines, /^\[\[limits\]\]\nid = "budget-it-s-mine-\w+"\nusd_per_month = 5$/);
assert.match(await page.getByRole("region", { name: "A first request" }).textContent(), /"model":"careful"/, "one that the key may use");
await judge(page, "issued with lines");
await shot(page, "issued-lines", false);
await page.getByRole("button", { name: "Done" }).click();
const limits = (await ask("/config/limits")).data.length;

// A port that listens everywhere is reached where the page was.
const reached = await page.evaluate(async () => {
  const { base } = await import(document.querySelector("script[src]").src.replace("app.js", "views/snippets.js"));
  return ["0.0.0.0:1", "[::]:2", "10.0.0.5:3"].map((listen) => base({ listen, tls: false }));
});
assert.deepEqual(reached, ["http://127.0.0.1:1", "http://127.0.0.1:2", "http://10.0.0.5:3"]);

// Events in every form that the standard allows.
const event = (delta, finish = null) => JSON.stringify({ choices: [{ index: 0, delta, finish_reason: finish }] });
let answers = [];
const bodies = [];
await page.route(/\/v1\/playground$/, (route) => {
  bodies.push(route.request().postDataJSON());
  const body = answers.shift();
  return body ? route.fulfill({ contentType: "text/event-stream", body }) : refused(route);
});
answers = [`: x-penstock-cost: 0.25\r\n\r\ndata:${event({ content: "Good\u2028day." })}\r\n\r\nevent: message\r\ndata: ${event({}, "stop")}\r\n\r\ndata:[DONE]\r\n\r\n`];
await view(page, "models");
await page.getByRole("button", { name: "Try careful", exact: true }).click();
await form.getByRole("button", { name: "Send" }).click();
await form.getByText("answered", { exact: true }).waitFor();
assert.equal(await form.locator(".facts div", { hasText: "Cost" }).locator("dd").textContent(), "$0.2500");
await form.getByRole("button", { name: "Done" }).click();
const asked = page.waitForRequest(/\/admin\/v1\/models\?/);
await page.getByRole("button", { name: "Refresh" }).click();
await asked;

// A chat in which requests fail stays one that a model can go on with.
bodies.length = 0;
const whole = (text) => `data: ${event({ content: text })}\n\ndata: ${event({}, "stop")}\n\ndata: [DONE]\n\n`;
const called = { tool_calls: [{ index: 0, id: "call_1", type: "function", function: { name: "look", arguments: "{}" } }] };
const roles = () => bodies.at(-1).messages.map((one) => (one.tool_calls ? "calls" : one.role));
await view(page, "playground");
const message = page.getByLabel("Message");
const send = async (text, then) => {
  answers = then ? [then] : [];
  if (text) await message.fill(text);
  await page.getByRole("button", { name: "Send", exact: true }).click();
  await page.getByText("The answer has ended.").waitFor();
};
await send("First", null);
await page.getByText("no part of the chat").waitFor();
assert.equal(await message.inputValue(), "First", "it can be sent again");
await send(null, whole("Yes."));
assert.deepEqual(roles(), ["user"]);
// Cut within a call, and by the most output tokens.
await send("Second", `data: ${event(called)}\n\n`);
assert.deepEqual(roles(), ["user", "assistant", "user"]);
await send("Second", `data: ${event({ content: "I look." })}\n\ndata: ${event(called)}\n\ndata: ${event({}, "length")}\n\n`);
await send("Third", `data: ${event(called)}\n\ndata: ${event({}, "tool_calls")}\n\n`);
assert.deepEqual(roles(), ["user", "assistant", "user", "assistant", "user"]);
const many = bodies.length;
await message.fill("Fourth");
await page.getByRole("button", { name: "Send", exact: true }).click();
await page.getByText(/Send the results of the model's calls first/).waitFor();
assert.equal(bodies.length, many);
const results = page.getByRole("button", { name: "Send the results" });
await page.getByLabel("Result of look").fill("a wall");
await results.click();
await page.getByText("Out of order.").last().waitFor();
await page.waitForFunction(() => document.querySelector("form.calls button:not([disabled])") !== null);
answers = [whole("A wall.")];
await results.click();
await page.getByText("A wall.", { exact: true }).waitFor();
assert.deepEqual(roles(), ["user", "assistant", "user", "assistant", "user", "calls", "tool"]);
await send("Fourth", whole("So."));
assert.deepEqual(roles().slice(-4), ["calls", "tool", "assistant", "user"]);
await page.unroute(/\/v1\/playground$/);

// The end of a session takes its dialogs with it.
await view(page, "keys");
await page.getByRole("button", { name: "Issue a key" }).click();
await form.getByLabel("Name").fill("late");
await page.route(/\/v1\/keys$/, only("POST", json({ error: { message: "Who are you?" } }, 401)));
await issue();
await page.getByLabel("Admin key").waitFor();
assert.equal(await page.locator("dialog").count(), 0);

// The refusals themselves are lines in the browser's console.
const wrong = faults.filter((fault) => !/status of (401|503)/.test(fault));
faults.length = 0;
faults.push(...wrong);
await done({ limits });
