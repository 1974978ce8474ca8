// Somebody who has just started a gateway: a key with a budget, its use from outside, its cost. `node newcomer.mjs '{"url": …, "key": …}'`.

import assert from "node:assert/strict";
import { execFileSync } from "node:child_process";

import { done, judge, open, shooter, signIn, view } from "./pages.mjs";

const { url, key, python, shots } = JSON.parse(process.argv[2]);
const shot = shooter(shots);
const { page } = await open(url);
await signIn(page, url, key);

// A key of one's own, for five dollars a month.
await page.getByRole("link", { name: "Keys" }).click();
await page.getByRole("button", { name: "Issue a key" }).click();
await page.getByLabel("Name").fill("My first app");
await page.getByLabel("Amount").fill("five");
await page.getByRole("dialog").getByRole("button", { name: "Issue", exact: true }).click();
await page.getByText("Budget: five is no such amount.").waitFor();
await page.getByLabel("Amount").fill("5");
await judge(page, "budget");
await shot(page, "budget", false);
await page.getByRole("dialog").getByRole("button", { name: "Issue", exact: true }).click();
const secret = await page.locator("#secret").textContent();
await page.getByRole("button", { name: "Done" }).click();

// A chat, and the same as code in each dialect, which runs as it is.
await page.getByRole("link", { name: "Playground" }).click();
await page.getByLabel("Model", { exact: true }).selectOption("assistant");
await page.getByText("Parameters").click();
await page.getByLabel("Most output tokens").fill("12");
await page.getByLabel("System prompt").fill("It's \"brief\".\nYou're $HOME, `too`.");
await page.getByLabel("Message").fill("Hello");
await page.getByRole("button", { name: "Send", exact: true }).click();
await page.getByText("The answer has ended.").waitFor();
assert.match(await page.locator(".turn .stats").textContent(), / · \$0\.\d+ · /, "its cost is told");
await page.getByLabel("Message").fill("What's a key?");
await page.getByRole("button", { name: "Code" }).click();
const env = { ...process.env, PENSTOCK_API_KEY: secret };
const dialects = await page.getByLabel("Dialect").locator("option").allTextContents();
for (const dialect of dialects) {
  await page.getByLabel("Dialect").selectOption(dialect);
  const code = await page.locator("#code").textContent();
  const [program, ...words] = dialect.endsWith("Python") ? [python, "-c", code] : ["bash", "-c", code.replace("curl ", "curl -sSf --max-time 60 ")];
  const said = execFileSync(program, words, { env, encoding: "utf8", timeout: 60_000 });
  assert.ok(said.trim().length > 0, dialect);
  if (!dialect.endsWith("Python")) assert.ok(!("error" in JSON.parse(said)), `${dialect}: ${said}`);
}
await page.getByRole("dialog").getByRole("button", { name: "Done" }).click();

// What it has cost, in the key's row, its budget and the sums.
await view(page, "keys");
await page.waitForFunction(async (count) => {
  dispatchEvent(new HashChangeEvent("hashchange"));
  await new Promise((finished) => setTimeout(finished, 300));
  return document.querySelector("tbody tr td:nth-child(8)")?.textContent === String(count);
}, dialects.length, { polling: 500 });
const cost = await page.locator("tbody tr td:nth-child(9)").first().textContent();
await page.getByRole("button", { name: "Details of My first app" }).click();
await page.getByText(/^budget-my-first-app-\w+: \$4\.9\d of \$5\.00 per month left$/).waitFor();
await shot(page, "budget-left", false);
await page.keyboard.press("Escape");
await page.getByRole("link", { name: "Usage" }).click();
await page.getByLabel("By", { exact: true }).selectOption("key");
await page.getByRole("rowheader", { name: "console:local" }).waitFor();
assert.equal(await page.getByRole("rowheader").count(), 2, "the new key, and the chat of the newcomer");

await done({ dialects: dialects.length, usd: Number(cost.slice(1)) });
