// Compiles the contracts of the tests: node scripts/compile-contracts.mjs TOOLS
// Writes TOOLS/contracts/NAME.json ({"abi": …, "bytecode": "0x…"}) where it is missing or older than its source.
import { existsSync, mkdirSync, readFileSync, readdirSync, statSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join, resolve } from "node:path";
import { fileURLToPath } from "node:url";

const tools = resolve(process.argv[2] ?? ".tools");
const modules = join(tools, "node_modules");
const sources = join(dirname(fileURLToPath(import.meta.url)), "../crates/tidemark/tests/contracts");
const out = join(tools, "contracts");

// Another compiler or library is another contract, too.
const versions = ["solc", "@openzeppelin/contracts"]
  .map((name) => `${name}@${JSON.parse(readFileSync(join(modules, name, "package.json"), "utf8")).version}`)
  .join(" ");

function isFresh(file, target) {
  if (!existsSync(target) || statSync(target).mtimeMs < statSync(join(sources, file)).mtimeMs) return false;
  return JSON.parse(readFileSync(target, "utf8")).versions === versions;
}

const due = readdirSync(sources)
  .filter((file) => file.endsWith(".sol"))
  .map((file) => ({ file, name: file.slice(0, -".sol".length) }))
  .filter(({ file, name }) => !isFresh(file, join(out, `${name}.json`)));

if (due.length > 0) {
  const solc = createRequire(join(modules, "solc/package.json"))("solc");
  const input = {
    language: "Solidity",
    sources: Object.fromEntries(due.map(({ file }) => [file, { content: readFileSync(join(sources, file), "utf8") }])),
    settings: {
      // Runs on every node the tests know, not only on the newest.
      evmVersion: "cancun",
      optimizer: { enabled: true, runs: 200 },
      outputSelection: { "*": { "*": ["abi", "evm.bytecode.object"] } },
    },
  };
  const find = (path) => {
    const file = join(modules, path);
    return existsSync(file) ? { contents: readFileSync(file, "utf8") } : { error: `${path} is not installed` };
  };
  const output = JSON.parse(solc.compile(JSON.stringify(input), { import: find }));
  const errors = (output.errors ?? []).filter((one) => one.severity === "error");
  if (errors.length > 0) {
    for (const one of errors) console.error(one.formattedMessage);
    process.exit(1);
  }
  mkdirSync(out, { recursive: true });
  for (const { file, name } of due) {
    const { abi, evm } = output.contracts[file][name];
    const made = { versions, abi, bytecode: `0x${evm.bytecode.object}` };
    writeFileSync(join(out, `${name}.json`), `${JSON.stringify(made)}\n`);
    console.log(`compiled ${file}`);
  }
}
