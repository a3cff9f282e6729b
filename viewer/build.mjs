// Builds the page into src/verbatim/inspection/viewer/assets: one script, one style sheet, one HTML file, and the licences of what
// is bundled. The hash of the sources stands in the script's and the style sheet's first line, so that a test sees
// assets that were not built again.
import { createHash } from "node:crypto";
import { cpSync, mkdirSync, readFileSync, readdirSync, writeFileSync } from "node:fs";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const assets = join(here, "..", "src", "verbatim", "inspection", "viewer", "assets");

/** sha256 over path and content of every source, in the order of their paths; tests/inspection/viewer/test_assets.py does the same. */
function hashOfSources() {
  const files = ["build.mjs", "package-lock.json", "package.json", "tsconfig.json"];
  for (const entry of readdirSync(join(here, "src"), { recursive: true, withFileTypes: true })) {
    if (entry.isFile()) files.push(join(entry.parentPath, entry.name).slice(here.length + 1).replaceAll("\\", "/"));
  }
  const hash = createHash("sha256");
  for (const file of files.sort()) {
    hash.update(`${file}\0`);
    hash.update(readFileSync(join(here, file)));
    hash.update("\0");
  }
  return hash.digest("hex");
}

function licences() {
  const { dependencies } = JSON.parse(readFileSync(join(here, "package.json"), "utf8"));
  const parts = Object.entries(dependencies).map(([name, version]) => {
    const text = readFileSync(join(here, "node_modules", name, "LICENSE"), "utf8").trim();
    return `${name} ${version}\n\n${text}\n`;
  });
  return `viewer.js and viewer.css contain these packages.\n\n${parts.join(`\n${"-".repeat(80)}\n\n`)}`;
}

mkdirSync(assets, { recursive: true });
const banner = `/* verbatim viewer, sources sha256:${hashOfSources()}; licences in NOTICE.txt */`;
await build({
  absWorkingDir: here,
  entryPoints: { viewer: "src/main.tsx" },
  outdir: assets,
  bundle: true,
  format: "iife",
  target: ["chrome110", "firefox115", "safari16.4"],
  jsx: "automatic",
  jsxImportSource: "preact",
  minify: true,
  charset: "ascii",
  legalComments: "none",
  banner: { js: banner, css: banner },
  logLevel: "info",
});
cpSync(join(here, "src", "index.html"), join(assets, "index.html"));
writeFileSync(join(assets, "NOTICE.txt"), licences());
