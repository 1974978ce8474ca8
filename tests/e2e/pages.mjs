// What the scripts of people at the console share: pages that are watched for faults, sign-in, views, and their judgement by axe.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

import { chromium } from "playwright-core";

const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");
const TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"];

export const browser = await chromium.launch({ executablePath: "/usr/bin/chromium", args: ["--no-sandbox", "--disable-gpu"] });
export const faults = [];

// A page that may ask nobody but `url`, and be led to `elsewhere`.
export async function open(url, options = {}, elsewhere = url) {
  const context = await browser.newContext({ viewport: { width: 1440, height: 900 }, reducedMotion: "reduce", ...options });
  const page = await context.newPage();
  // Pages and their icons alone: no script of the console asks there.
  const isLed = (request, place) => place.origin === elsewhere && ["document", "other"].includes(request.resourceType());
  page.setDefaultTimeout(30_000);
  await page.addInitScript(() => {
    addEventListener("securitypolicyviolation", (event) => console.error(`CSP: ${event.violatedDirective} ${event.blockedURI}`));
    globalThis.alert = () => console.error("XSS: a script from outside ran");
  });
  page.on("console", (line) => line.type() === "error" && faults.push(`console: ${line.text()} ${line.location().url}`));
  page.on("pageerror", (error) => faults.push(`page: ${error.stack}`));
  page.on("request", (request) => {
    const place = new URL(request.url());
    if (place.protocol !== "data:" && place.protocol !== "blob:" && place.origin !== url && !isLed(request, place)) faults.push(`asked ${request.url()}`);
  });
  return { context, page };
}

export async function signIn(page, url, text) {
  await page.goto(`${url}/console/`);
  await page.getByLabel("Admin key").fill(text);
  await page.getByRole("button", { name: "Sign in" }).click();
  await page.getByRole("navigation", { name: "Views" }).waitFor({ state: "attached" });
}

// Told with its time where a script does not end.
const step = (what) => console.error(`${(performance.now() / 1000).toFixed(1)} s: ${what}`);

export async function view(page, name) {
  step(`view ${name}`);
  await page.evaluate((to) => (location.hash = `#/${to}`), name);
  await page.waitForFunction((to) => document.querySelector(`[data-view="${to}"]`)?.getAttribute("aria-current") === "page", name);
  // Every view ends with a table, figures, text or a choice of models from the gateway.
  await page.waitForFunction(() => document.querySelector(".view")?.querySelector("td, .worker, .lane, .tile, #model option") !== null);
  await page.waitForFunction(() => !document.querySelector("textarea#config") || document.querySelector("textarea#config").value !== "");
}

export async function judge(page, what) {
  step(`judge ${what}`);
  await page.evaluate(axe);
  const found = await page.evaluate((tags) => globalThis.axe.run(document, { runOnly: tags, resultTypes: ["violations"] }), TAGS);
  for (const one of found.violations) {
    faults.push(`axe ${what}: ${one.id}: ${one.nodes.map((node) => `${node.target} ${node.failureSummary}`).slice(0, 3).join(" | ")}`);
  }
  const [wide, inner] = await page.evaluate(() => [document.documentElement.scrollWidth, innerWidth]);
  if (wide > inner) faults.push(`${what}: ${wide} px wide in ${inner}`);
}

// Screenshots in a folder; none without one.
export const shooter = (folder) => (page, name, full = true) => folder && page.screenshot({ path: `${folder}/${name}.png`, fullPage: full });

// Ends the script: no fault was seen, and the last line says what was found.
export async function done(found) {
  step("close");
  await browser.close();
  assert.equal(faults.length, 0, faults.join("\n"));
  console.log(JSON.stringify(found));
}
