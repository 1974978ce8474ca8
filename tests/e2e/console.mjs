// A person at the console, in Debian's Chromium: `node console.mjs '{"url": …, "key": …}'`. What must hold is asserted here; the last line
// of the output is JSON with what the caller wants to know.

import assert from "node:assert/strict";

import { browser, done, faults, judge, open, shooter, signIn, view } from "./pages.mjs";

const { url, key, viewer, data, shots, hostile } = JSON.parse(process.argv[2]);
const VIEWS = ["live", "requests", "playground", "keys", "usage", "batches", "models", "plugins", "decisions", "config", "audit"];
const shot = shooter(shots);

// A wrong key, then the right one.
const { context, page } = await open(url);
await page.goto(`${url}/`);
await page.getByLabel("Admin key").fill("psa_wrong");
await page.getByRole("button", { name: "Sign in" }).click();
await page.getByRole("alert").waitFor();
assert.match(await page.getByRole("alert").textContent(), /no key of the admin API/);
// The refusal itself is a line in the browser's console.
assert.equal(faults.filter((fault) => !/status of 401/.test(fault)).length, 0, faults.join("\n"));
faults.length = 0;
await judge(page, "sign-in");
await shot(page, "sign-in");
await signIn(page, url, key);

// Cookies: what scripts and other sites do not get.
const cookies = await context.cookies(`${url}/admin/v1/session`);
assert.equal(cookies.length, 1);
assert.deepEqual([cookies[0].httpOnly, cookies[0].sameSite, cookies[0].path], [true, "Strict", "/admin/v1"]);
assert.equal(await page.evaluate(() => document.cookie), "");

// A key is issued, its text is shown once and works.
await view(page, "keys");
await page.getByRole("button", { name: "Issue a key" }).click();
await page.getByLabel("Name").fill(hostile);
await page.getByLabel("standard").check();
await judge(page, "issue");
await shot(page, "issue", false);
await page.getByRole("dialog").getByRole("button", { name: "Issue", exact: true }).click();
const secret = await page.locator("#secret").textContent();
// Answer of the admin API to the person who has signed in.
const ask = (path) => page.evaluate(async (place) => {
  const token = localStorage.getItem("penstock.token");
  const answer = await fetch(`/admin/v1${place}`, { headers: { "x-penstock-session": token } });
  return answer.json();
}, path);
await judge(page, "issued");
await shot(page, "issued", false);
await page.getByRole("button", { name: "Done" }).click();
await page.getByRole("row", { name: hostile }).waitFor();
assert.equal((await page.content()).includes(secret), false, "the text is gone");
const asked = { model: "penstock-demo", max_tokens: 8, messages: [{ role: "user", content: "Hello" }] };
const headers = { authorization: `Bearer ${secret}`, "content-type": "application/json" };
for (let turn = 0; turn < 3; turn += 1) {
  const answer = await fetch(`${data}/v1/chat/completions`, { method: "POST", headers, body: JSON.stringify(asked) });
  assert.equal(answer.status, 200, await answer.text());
}
// The ledger is written a moment later.
await page.waitForFunction(async () => {
  dispatchEvent(new HashChangeEvent("hashchange"));
  await new Promise((done) => setTimeout(done, 300));
  return document.querySelector("tbody tr td:nth-child(8)")?.textContent === "3";
}, undefined, { polling: 500 });

await page.getByRole("button", { name: /^Details of/ }).click();
await page.getByText(/^standard: \d+ of 1,000 requests per minute left$/).waitFor();
await judge(page, "details");
await shot(page, "details", false);
await page.keyboard.press("Escape");

// A stream is seen in flight, and cancelled by a click.
const stream = await fetch(`${data}/v1/chat/completions`, {
  method: "POST", headers, body: JSON.stringify({ ...asked, stream: true, max_tokens: 100_000, n: 8, ignore_eos: true }),
});
const read = async () => {
  // A stream that was cut looks cut: what came before is the text.
  let text = "";
  try {
    for await (const piece of stream.body.pipeThrough(new TextDecoderStream())) text += piece;
  } catch {
    text += "\ncut";
  }
  return text;
};
const long = read();
// By its id: the page is told once a second what is in flight, and may still show a request that has ended since.
const { data: inFlight } = await ask("/requests");
const { id } = inFlight.find((one) => one.stream);
await view(page, "requests");
await page.getByRole("button", { name: `Cancel request ${id}`, exact: true }).click();
await shot(page, "cancel", false);
await page.getByRole("dialog").getByRole("button", { name: "Cancel the request" }).click();
assert.match(await long, /cancelled by an operator/);
await page.getByText("Nothing is in flight.").waitFor();

// A config is checked, refused, changed and rolled back.
await view(page, "config");
const editor = page.getByLabel("Config as TOML");
const before = await editor.inputValue();
await editor.fill(`${before}\n[server]\nlissten = 1\n`);
await page.getByRole("button", { name: "Check" }).click();
await page.getByText(/fault/).first().waitFor();
await editor.fill(before.replace("requests_per_minute = 1000", "requests_per_minute = 2000"));
await page.getByRole("button", { name: "Check" }).click();
await page.getByText("The config is valid").waitFor();
await judge(page, "config checked");
await shot(page, "config-checked");
await page.getByRole("button", { name: "Apply …" }).click();
await page.getByLabel("Note for the history").fill("twice as many");
await page.getByRole("dialog").getByRole("button", { name: "Apply", exact: true }).click();
await page.getByRole("cell", { name: "twice as many" }).waitFor();
await page.getByRole("button", { name: "Roll back to version 1", exact: true }).click();
await page.getByRole("dialog").getByRole("button", { name: "Roll back" }).click();
await page.getByText("Version 3 is in force.").waitFor();
await page.waitForFunction((text) => document.getElementById("config").value === text, before);

// A worker is killed while one looks: its card says so, and says when it is back.
await view(page, "live");
await page.getByRole("region", { name: "Worker penstock-demo-1" }).waitFor();
const worker = await ask("/workers/penstock-demo-1");
process.kill(worker.pid, "SIGKILL");
const card = page.getByRole("region", { name: "Worker penstock-demo-1" });
await card.getByText(/lost 1 time/).waitFor();
await shot(page, "live-lost");
await card.getByText("ready", { exact: true }).waitFor({ timeout: 60_000 });
await page.getByRole("button", { name: /^Explain where/ }).first().click();
await page.getByRole("textbox", { name: "Prompt" }).fill("Once upon a time");
await page.getByRole("dialog").getByRole("button", { name: "Explain" }).click();
await page.getByText("chosen").waitFor();
await judge(page, "explain");
await shot(page, "explain", false);
await page.keyboard.press("Escape");

// Two models side by side, with the probabilities of their tokens.
await view(page, "playground");
await page.getByLabel("Model", { exact: true }).selectOption("penstock-demo");
await page.getByLabel("Beside it").selectOption("second");
await page.getByText("Parameters").click();
await page.getByLabel("System prompt").fill("You are brief.");
await page.getByLabel("Temperature").fill("0.5");
await page.getByLabel("Seed").fill("7");
await page.getByLabel("Most output tokens").fill("24");
await page.getByLabel("Probabilities of tokens").check();
await page.getByLabel("Message").fill(hostile);
await page.getByRole("button", { name: "Send", exact: true }).click();
const answered = () => page.getByText("The answer has ended.").waitFor();
await answered();
const stats = await page.locator(".turn .stats").allTextContents();
assert.equal(stats.length, 2);
for (const line of stats) assert.match(line, /first token .* tokens\/s( in all)? · [\d,]+ prompt tokens · [\d,]+ of them cached · \d+ output tokens · (stop|length)$/);
assert.equal(await page.getByText(hostile, { exact: true }).count(), 2, "one on each side, as text");
assert.ok((await page.locator(".token").count()) >= 2);
await page.getByText("Probabilities", { exact: true }).first().click();
await judge(page, "playground answered");
await shot(page, "playground-two");

// The second turn finds the first one in the cache.
await page.getByLabel("Beside it").selectOption("");
await page.getByLabel("Message").fill("And again, please.");
await page.getByLabel("Message").press("Control+Enter");
await page.waitForFunction(() => document.querySelectorAll(".turn .stats").length === 2);
await page.waitForFunction(() => /of them cached/.test([...document.querySelectorAll(".turn .stats")].at(-1).textContent));
await answered();

// Code of the same request, and a fault of the form.
await page.getByRole("button", { name: "Code" }).click();
assert.match(await page.locator("#code").textContent(), /client\.chat\.completions\.create\(\n {4}model="penstock-demo",/);
await judge(page, "code");
await shot(page, "playground-code", false);
await page.keyboard.press("Escape");
await page.getByRole("button", { name: "Clear" }).click();
await page.getByText("Tools and structured output").click();
await page.getByLabel("Schema of the answer").fill("{");
await page.getByLabel("Message").fill("Name a colour.");
await page.getByRole("button", { name: "Send", exact: true }).click();
await page.getByText(/Schema of the answer: no JSON/).waitFor();
const schema = { type: "object", properties: { colour: { enum: ["red", "blue"] } }, required: ["colour"], additionalProperties: false };
await page.getByLabel("Schema of the answer").fill(JSON.stringify(schema));
await page.getByLabel("Probabilities of tokens").uncheck();
await page.getByRole("button", { name: "Send", exact: true }).click();
await answered();
const colour = JSON.parse(await page.locator(".turn:not(.mine) .said:not(.faint)").last().textContent());
assert.ok(["red", "blue"].includes(colour.colour), JSON.stringify(colour));
await page.getByLabel("Schema of the answer").fill("");

// A provider whose every text is markup: reasoning, answer, calls of tools; results go back to it.
await page.getByRole("button", { name: "Clear" }).click();
await page.getByLabel("Model", { exact: true }).selectOption("far");
await page.getByLabel("Message").fill("Look.");
await page.getByRole("button", { name: "Send", exact: true }).click();
await page.getByLabel("Result of look").fill(hostile);
await answered();
assert.equal(await page.getByText(hostile, { exact: true }).count(), 2, "the reasoning and the answer");
await judge(page, "playground tools");
await shot(page, "playground-tools");
await page.getByRole("button", { name: "Send the results" }).click();
await page.getByLabel("Result of look").nth(1).waitFor();
await answered();
assert.equal(await page.locator("#main img, #main b, #main script").count(), 0);

// An answer that is stopped leaves nothing in flight.
await page.getByRole("button", { name: "Clear" }).click();
await page.getByLabel("Message").fill("hold");
await page.getByRole("button", { name: "Send", exact: true }).click();
await page.getByText(hostile, { exact: true }).nth(1).waitFor();
await page.getByRole("button", { name: "Stop" }).click();
await answered();
assert.match(await page.locator(".turn .stats").last().textContent(), / · stopped$/);
await view(page, "requests");
await page.getByText("Nothing is in flight.").waitFor();

// A model is tried, and a provider by one of its names: one request of this person, with its times and cost.
await view(page, "models");
await page.getByRole("button", { name: "Try priced", exact: true }).click();
const dialog = page.getByRole("dialog");
await judge(page, "try");
await dialog.getByRole("button", { name: "Send" }).click();
await dialog.getByText("answered", { exact: true }).waitFor();
const fact = (name) => dialog.locator(".facts div", { hasText: name }).locator("dd").textContent();
assert.match(await fact("Time to the first token"), /^[\d.]+ (µs|ms|s)$/);
assert.match(await fact("Output tokens"), /^[1-9]\d*$/);
assert.match(await fact("Cost"), /^\$0\.\d*[1-9]/);
await judge(page, "tried model");
await shot(page, "models-tried", false);
await dialog.getByRole("button", { name: "Done" }).click();
await page.getByRole("button", { name: "Try provider elsewhere" }).click();
await dialog.getByLabel("Model").selectOption("far-model");
await dialog.getByRole("button", { name: "Send" }).click();
await dialog.getByText(hostile, { exact: true }).waitFor();
assert.equal(await fact("Cost"), "no price");
await dialog.getByRole("button", { name: "Done" }).click();
await page.getByRole("button", { name: "Try tight", exact: true }).click();
await dialog.getByRole("button", { name: "Send" }).click();
await dialog.getByText("answered", { exact: true }).waitFor();
await dialog.getByRole("button", { name: "Send" }).click();
await dialog.getByRole("alert").waitFor();
assert.match(await dialog.getByRole("alert").textContent(), /limit/i, "the limit for everyone holds here too");
// The refusal itself is a line in the browser's console.
assert.ok(faults.length > 0 && faults.every((fault) => /status of 429/.test(fault)), faults.join("\n"));
faults.length = 0;
await dialog.getByRole("button", { name: "Done" }).click();
assert.equal(await page.locator("#main img, #main b, #main script").count(), 0);

// A batch of the key, whose one request ends with nobody, is seen and cancelled; its file can be deleted then, and not before.
const form = new FormData();
const body = { ...asked, model: "far", messages: [{ role: "user", content: "hold" }] };
const fileName = "<img src=x onerror=alert(5)>.jsonl";
form.set("purpose", "batch");
form.set("file", new Blob([JSON.stringify({ custom_id: "1", method: "POST", url: "/v1/chat/completions", body })]), fileName);
const bearer = { authorization: headers.authorization };
const file = await (await fetch(`${data}/v1/files`, { method: "POST", headers: bearer, body: form })).json();
const made = await fetch(`${data}/v1/batches`, {
  method: "POST", headers, body: JSON.stringify({ input_file_id: file.id, endpoint: "/v1/chat/completions", completion_window: "24h" }),
});
const batch = await made.json();
assert.equal(made.status, 200, JSON.stringify(batch));
await view(page, "batches");
const row = page.getByRole("region", { name: "Batches" }).getByRole("row", { name: batch.id });
// A view is drawn once: it is shown anew until the gateway says so.
const again = async (words, list = "Batches") => {
  for (const end = Date.now() + 60_000; ; ) {
    await page.getByRole("form", { name: `Which ${list}` }).getByRole("button", { name: "Show" }).click();
    await page.waitForLoadState("networkidle").catch(() => {});
    if (await page.getByRole("region", { name: list }).getByText(words).count()) return;
    assert.ok(Date.now() < end, `${list}: ${words}`);
  }
};
await again("in progress");
assert.equal(await page.getByRole("button", { name: `Delete file ${fileName}` }).count(), 0, "it is in use");
await judge(page, "batch runs");
await row.getByRole("button", { name: /^Cancel batch/ }).click();
await page.getByRole("dialog").getByRole("button", { name: "Cancel the batch" }).click();
await again("cancelled");
assert.equal((await (await fetch(`${data}/v1/batches/${batch.id}`, { headers: bearer })).json()).status, "cancelled");
await again(fileName, "Files");
await page.getByRole("button", { name: `Delete file ${fileName}` }).click();
await judge(page, "delete file");
await page.getByRole("dialog").getByRole("button", { name: "Delete the file" }).click();
await page.getByText("The file is deleted.").waitFor();
await page.getByRole("button", { name: `Delete file ${fileName}` }).waitFor({ state: "detached" });
assert.equal((await fetch(`${data}/v1/files/${file.id}`, { headers: bearer })).status, 404);
assert.equal(await page.locator("#main img, #main b, #main script").count(), 0);

// A request is tried on the plugins: what each of them did, as text, and what the client would be refused with.
await view(page, "plugins");
await page.getByLabel("Key id").fill("console:trial");
await page.getByLabel("Headers", { exact: true }).fill("x-team: red\nauthorization: Bearer secret-of-somebody");
const trial = { model: "priced", messages: [{ role: "user", content: `${hostile} to ann@example.com` }] };
await page.getByLabel("Body", { exact: true }).fill("{");
await page.getByRole("button", { name: "Try", exact: true }).click();
await page.getByText(/Body: no JSON/).waitFor();
await page.getByLabel("Body", { exact: true }).fill(JSON.stringify(trial));
await page.getByRole("button", { name: "Try", exact: true }).click();
await page.getByText("The request would go on to its model, under its limits.").waitFor();
const steps = page.getByRole("list", { name: "Steps" }).locator("li");
assert.deepEqual(await steps.locator(".chip").allTextContents(), ["passed", "changed", "changed"]);
assert.match(await steps.nth(1).textContent(), /<img src=x onerror=alert\(4\)>/);
assert.match(await steps.nth(2).textContent(), /to \[EMAIL_1\]/);
await page.getByText("The request behind the plugins").click();
assert.match(await page.getByRole("region", { name: "Headers behind the plugins" }).textContent(), /^x-team: red$/);
await judge(page, "tried");
await shot(page, "plugins-tried");
trial.messages[0].content = "the unsayable word";
await page.getByLabel("Body", { exact: true }).fill(JSON.stringify(trial));
await page.getByRole("button", { name: "Try", exact: true }).click();
await page.getByRole("heading", { name: "What the client gets: 400" }).waitFor();
assert.deepEqual(await steps.locator(".chip").allTextContents(), ["refused", "not reached", "not reached"]);
await judge(page, "refused");
assert.equal(await page.locator("#main img, #main b, #main script").count(), 0);

// What the router has decided, with the regret of each choice.
await view(page, "decisions");
await page.getByRole("img", { name: /^Regret over time/ }).waitFor();
assert.equal(await page.getByLabel("Pool").inputValue(), "penstock-demo", "the first one");
await page.getByLabel("Chart").selectOption("saved");
await page.getByRole("img", { name: /^Saved over time/ }).waitFor();
const decided = page.getByRole("region", { name: "Last decisions" });
assert.ok((await decided.locator("tbody tr").count()) > 3);
// They are kept up to date without a new table: what somebody has focused or selected stays.
await decided.focus();
await decided.locator("tbody tr").first().evaluate((row) => row.setAttribute("data-kept", "yes"));
for (let turn = 0; turn < 2; turn += 1) await page.waitForResponse(/\/decisions\?/);
await page.waitForTimeout(200);
assert.equal(await page.locator("tr[data-kept]").count(), 1);
assert.equal(await page.evaluate(() => document.activeElement.getAttribute("aria-label")), "Last decisions");

// Some load, so that the figures show something.
const load = Array.from({ length: 6 }, (_, at) => fetch(`${data}/v1/chat/completions`, {
  method: "POST", headers,
  body: JSON.stringify({ ...asked, max_tokens: 300, ignore_eos: true, messages: [{ role: "user", content: `Tell me story ${at % 2}. ${"And more. ".repeat(40)}` }] }),
}).then((answer) => answer.text()));

// Every view, in both themes, narrow and wide.
for (const theme of ["light", "dark"]) {
  await page.evaluate((to) => {
    localStorage.setItem("penstock.theme", to);
    document.documentElement.setAttribute("data-theme", to);
  }, theme);
  for (const width of [1440, 360]) {
    await page.setViewportSize({ width, height: 900 });
    for (const name of VIEWS) {
      await view(page, name);
      await judge(page, `${name} ${theme} ${width}`);
      await shot(page, `${name}-${theme}-${width}`);
    }
  }
}
await Promise.all(load);
await page.setViewportSize({ width: 1440, height: 900 });

// By keyboard alone: the first stop skips to the content, links are reached in order.
await page.reload();
await page.getByRole("navigation", { name: "Views" }).waitFor();
await page.evaluate(() => document.activeElement.blur());
await page.keyboard.press("Tab");
assert.equal(await page.evaluate(() => document.activeElement.textContent), "Skip to content");
await page.keyboard.press("Tab");
assert.equal(await page.evaluate(() => document.activeElement.dataset.view), "live");
await page.keyboard.press("Tab");
await page.keyboard.press("Enter");
await page.getByRole("heading", { level: 1, name: "Requests" }).waitFor();
assert.equal(await page.evaluate(() => document.activeElement.id), "main", "the focus follows");

// A viewer sees no control that the role does not have.
const guest = await open(url);
await signIn(guest.page, url, viewer);
for (const name of VIEWS.filter((one) => !["audit", "playground"].includes(one))) {
  await view(guest.page, name);
  const words = await guest.page.getByRole("button").allTextContents();
  const wrong = words.filter((word) => /^(Try|Send|Delete|Issue|Cancel|Drain|Restart|Apply|Check|Roll back|Revoke|Rotate|Change)/.test(word));
  assert.deepEqual(wrong, [], name);
}
for (const name of ["Audit", "Playground"]) assert.equal(await guest.page.getByRole("link", { name }).count(), 0);
await guest.page.getByRole("button", { name: "Sign out" }).click();
await guest.page.getByLabel("Admin key").waitFor();
assert.equal((await guest.context.cookies(`${url}/admin/v1/session`)).length, 0);

await done({ views: VIEWS.length * 4 });
