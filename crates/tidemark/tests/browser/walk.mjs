// A visitor's walk through the explorer. Told as JSON in the first argument: url, network, address, pictures.
// Asks the test for blocks on standard output and reads its answers from standard input, one line each.
import assert from "node:assert/strict";
import { createRequire } from "node:module";
import { join } from "node:path";
import { createInterface } from "node:readline";

const { chromium } = createRequire(import.meta.url)(process.env.PLAYWRIGHT);
const told = JSON.parse(process.argv[2]);
const answers = createInterface({ input: process.stdin })[Symbol.asyncIterator]();
const PATIENCE = 40_000;

const seen = (step) => console.log(JSON.stringify({ seen: step }));
async function ask(what) {
  console.log(JSON.stringify({ ask: what }));
  return JSON.parse((await answers.next()).value);
}

const browser = await chromium.launch({
  executablePath: process.env.CHROMIUM,
  args: [
    "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--no-first-run",
  ],
});

// What no page may do, whatever else the walk looks at.
const complaints = [];
function watch(page) {
  page.setDefaultTimeout(PATIENCE);
  page.on("console", (message) => {
    if (message.type() === "error" || message.type() === "warning") {
      complaints.push(`console: ${message.text()} (${page.url()})`);
    }
  });
  page.on("pageerror", (error) => complaints.push(`error: ${error.message} (${page.url()})`));
  page.on("response", (response) => {
    if (response.status() >= 400) complaints.push(`${response.status()} ${response.url()}`);
  });
  page.on("request", (request) => {
    if (!request.url().startsWith(told.url)) complaints.push(`a request to a stranger: ${request.url()}`);
  });
  return page;
}

async function go(page, path) {
  const response = await page.goto(told.url + path, { waitUntil: "load" });
  const policy = response.headers()["content-security-policy"] ?? "";
  const scripts = /script-src([^;]*)/.exec(policy)?.[1] ?? /default-src([^;]*)/.exec(policy)?.[1];
  assert.ok(scripts, `${path} has no policy for scripts: ${policy}`);
  assert.doesNotMatch(scripts, /unsafe|\*|data:|https?:/, `${path} allows scripts from elsewhere: ${policy}`);
  assert.equal(await page.locator("script:not([src]), [onclick], [onload]").count(), 0, `${path} has inline scripts`);
}

// Tab until the focus is on a link that begins like this.
async function tabTo(page, start) {
  for (let presses = 0; presses < 80; presses += 1) {
    await page.keyboard.press("Tab");
    const href = await page.evaluate(() => document.activeElement?.getAttribute("href") ?? "");
    if (href.startsWith(start)) {
      const ring = await page.evaluate(() => getComputedStyle(document.activeElement).outlineStyle);
      assert.notEqual(ring, "none", "the focus is invisible");
      return href;
    }
  }
  throw new Error(`no link to ${start} can be reached by Tab on ${page.url()}`);
}

// Text too pale for its ground (WCAG AA), what has no accessible name, tables without a caption.
function barriers() {
  const parse = (text) => { const n = text.match(/[\d.]+/g).map(Number); return { r: n[0], g: n[1], b: n[2], a: n[3] ?? 1 }; };
  const mix = (top, below, at) => top[at] * top.a + below[at] * (1 - top.a);
  const over = (top, below) => ({ r: mix(top, below, "r"), g: mix(top, below, "g"), b: mix(top, below, "b"), a: 1 });
  const light = (color) => {
    const [r, g, b] = [color.r, color.g, color.b].map((v) => (v / 255 <= 0.04045 ? v / 255 / 12.92 : ((v / 255 + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, top) => over(top, below), { r: 255, g: 255, b: 255, a: 1 });
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const hasText = Array.from(element.childNodes).some((node) => node.nodeType === 3 && node.textContent.trim());
    if (!hasText || !element.checkVisibility() || element.closest("svg")) continue;
    const style = getComputedStyle(element);
    const size = parseFloat(style.fontSize);
    const back = ground(element);
    const [high, low] = [light(over(parse(style.color), back)), light(back)].sort((a, b) => b - a);
    const needed = size >= 24 || (size >= 18.6 && Number(style.fontWeight) >= 700) ? 3 : 4.5;
    const ratio = (high + 0.05) / (low + 0.05);
    if (ratio < needed) found.push(`contrast ${ratio.toFixed(2)}: ${element.tagName}.${element.className} ${element.textContent.trim().slice(0, 30)}`);
  }
  for (const element of document.querySelectorAll("a[href], button, input")) {
    if (!element.checkVisibility()) continue;
    const name = element.getAttribute("aria-label") || element.textContent.trim() || element.getAttribute("title");
    if (!name) found.push(`no name: ${element.outerHTML.slice(0, 80)}`);
  }
  for (const table of document.querySelectorAll("table")) if (!table.caption) found.push(`no caption: ${table.className}`);
  if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
  return [...new Set(found)].slice(0, 10);
}

const picture = (page, name) => page.screenshot({ path: join(told.pictures, `${name}.png`), fullPage: true });

try {
  const desk = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme: "light" });
  const page = watch(await desk.newPage());

  await go(page, "/");
  await page.locator(".strip", { hasText: told.network }).waitFor();
  assert.ok((await page.locator("#rows tr[data-event]").count()) >= 10, "home shows few transfers");
  assert.ok((await page.locator("#rows tr.wet").count()) > 0, "nothing above finality is marked");
  await picture(page, "home-light");
  seen("home");

  // The keyboard alone: to an account, to something it owns.
  await page.keyboard.press("/");
  await page.keyboard.type(told.address);
  await page.keyboard.press("Enter");
  await page.waitForURL(/\/(search\?|accounts\/)/);
  const account = `/accounts/${told.network}/${told.address}`;
  if (page.url().includes("/search?")) {
    await tabTo(page, account);
    await page.keyboard.press("Enter");
    await page.waitForURL(`**${account}`);
  }
  assert.equal(await page.locator("h1").evaluate((title) => title.firstChild.textContent.trim()), told.address);
  await picture(page, "account");
  seen("search");

  const asset = await tabTo(page, `/assets/${told.network}/`);
  await page.keyboard.press("Enter");
  await page.waitForURL(`**${asset}`);
  const answer = await page.locator("#answer .answer").innerText();
  assert.match(answer, /Owned by|owners of/, answer);
  assert.match(answer, /final|confirmed|wet|pending/i, `it does not say how sure it is: ${answer}`);
  assert.ok((await page.locator("#rows tr[data-event]").count()) > 0, "an owned asset has no history");
  await picture(page, "asset");
  seen("asset");

  // A transfer arrives while the page is open, and a reorg takes it back.
  await go(page, "/transfers");
  await page.evaluate(() => { window.sameDocument = true; });
  const mined = await ask("mine");
  const arrived = page.locator(mined.transactions.map((hash) => `#rows tr:has(a[href="/tx/${told.network}/${hash}"])`).join(","));
  await arrived.first().waitFor();
  const event = await arrived.first().getAttribute("data-event");
  assert.ok(await page.evaluate(() => window.sameDocument), "the page was loaded again");
  seen("live");

  await ask("drop");
  const struck = page.locator(`#rows tr.gone[data-event="${event}"]`);
  await struck.waitFor();
  assert.equal(await struck.locator(".badge").innerText(), "reverted");
  assert.match(await struck.locator(".c-kind").evaluate((cell) => getComputedStyle(cell).textDecorationLine), /line-through/);
  assert.ok(await page.evaluate(() => window.sameDocument), "the page was loaded again");
  await picture(page, "reorg");
  // Pages go on showing it as taken back; the API lists it only for those who ask.
  await page.reload();
  const drawn = await page.locator(`tr[data-event="${event}"]`).getAttribute("class");
  assert.equal(drawn, "gone", "a reverted transfer is shown as if it had happened");
  const listed = async (query) => {
    const answer = await page.request.get(`${told.url}/v1/transfers?network=${told.network}&limit=50${query}`);
    return (await answer.json()).items.find((item) => item.event_id === event)?.finality_status;
  };
  assert.equal(await listed(""), undefined, "a reverted transfer is listed unasked");
  assert.equal(await listed("&include_reverted=true"), "reverted");
  seen("reorg");

  await go(page, "/");
  const ground = () => page.evaluate(() => getComputedStyle(document.body).backgroundColor);
  const light = await ground();
  await page.locator("button.theme").click();
  const dark = await ground();
  assert.notEqual(dark, light, "the switch changes nothing");
  await page.reload();
  assert.equal(await ground(), dark, "the choice is forgotten");
  await picture(page, "home-dark");
  const collection = await page.locator('#rows a[href^="/collections/"]').first().getAttribute("href");
  await go(page, collection);
  assert.equal(await ground(), dark, "the choice holds for one page only");
  await page.locator("button.theme").click();
  assert.equal(await ground(), light, "there is no way back");
  await picture(page, "collection");
  await go(page, "/operator");
  await picture(page, "operator");
  seen("theme");

  // Every page in both themes: nobody is kept out.
  const screens = { home: "/", collection, asset, account, transfers: "/transfers", operator: "/operator", collections: "/collections", docs: "/docs", search: "/search?q=a" };
  for (const scheme of ["light", "dark"]) {
    const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, colorScheme: scheme });
    const screen = watch(await context.newPage());
    for (const [name, path] of Object.entries(screens)) {
      await go(screen, path);
      assert.deepEqual(await screen.evaluate(barriers), [], `${name} in ${scheme}`);
      if (scheme === "dark") await picture(screen, `dark-${name}`);
    }
    // What is not there is said, with a way on. The browser reports a 404 as an error: nobody watches here.
    const lost = await context.newPage();
    for (const [name, path, says] of [
      ["missing", "/nowhere", /There is no page at this address/],
      ["pending", `/blocks/${told.network}/99999999`, /Not here yet[\s\S]*we have read to/],
      ["mistyped", `/accounts/${told.network}/0x12`, /Not an address of this network/],
      ["nothing", "/search?q=no+such+thing", /Nothing here is called that/],
    ]) {
      await lost.goto(told.url + path);
      assert.match(await lost.locator("main").innerText(), says, name);
      assert.ok((await lost.locator('main input[type="search"], header input[type="search"]').count()) > 0, `${name} offers no search`);
      assert.deepEqual(await lost.evaluate(barriers), [], `${name} in ${scheme}`);
      await picture(lost, `${scheme}-${name}`);
    }
    await context.close();
  }
  seen("states");

  const phone = await browser.newContext({ viewport: { width: 390, height: 844 }, deviceScaleFactor: 2, hasTouch: true });
  const small = watch(await phone.newPage());
  for (const [name, path] of Object.entries(screens)) {
    await go(small, path);
    const wide = await small.evaluate(() => {
      const limit = document.documentElement.clientWidth;
      if (document.documentElement.scrollWidth <= limit) return [];
      return Array.from(document.querySelectorAll("body *"))
        .filter((element) => element.getBoundingClientRect().right > limit + 1)
        .map((element) => `${element.tagName}.${element.className}`).slice(0, 5);
    });
    assert.deepEqual(wide, [], `${name} is wider than a phone`);
    const crossed = await small.evaluate(() => Array.from(document.querySelectorAll("#rows tr[data-event]"))
      .filter((row) => {
        // The text, not the cell: a cell that is too narrow lets its text run over the next one.
        const text = (cell) => { const range = document.createRange(); range.selectNodeContents(row.querySelector(cell)); return range.getBoundingClientRect(); };
        const boxes = [".c-from", ".c-to", ".c-kind", ".c-block", ".c-age", ".c-sure"].map(text);
        return boxes.some((a, at) => boxes.slice(at + 1).some((b) =>
          a.left < b.right - 1 && b.left < a.right - 1 && a.top < b.bottom - 4 && b.top < a.bottom - 4));
      }).map((row) => row.innerText));
    assert.deepEqual(crossed, [], `${name} has text over text`);
    await picture(small, `phone-${name}`);
  }
  seen("phone");

  // Without scripts everything is there, only not live.
  const bare = await browser.newContext({ javaScriptEnabled: false });
  const plain = watch(await bare.newPage());
  await go(plain, asset);
  assert.match(await plain.locator("#answer .answer").innerText(), /Owned by|owners of|Burned/);
  assert.ok(await plain.locator("button.theme").isHidden(), "a switch that cannot work is shown");
  seen("plain");

  assert.deepEqual(complaints, []);
} finally {
  await browser.close();
}
process.exit(0);
