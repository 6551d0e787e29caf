// The rules for the scripts of the server's page, which are modules, and of the page of a trace, which are one script.
import js from "@eslint/js";
import globals from "globals";

const rules = { "no-control-regex": "off" }; // texts of a model are searched for control characters

export default [
  js.configs.recommended,
  { files: ["src/descant/serve/page/*.js"], languageOptions: { globals: globals.browser }, rules },
  {
    files: ["src/descant/trace/pictures/assets/*.js"],
    languageOptions: { sourceType: "script", globals: { ...globals.browser, descant: "writable" } },
    // Its first file declares the name that the others add to.
    rules: { "no-redeclare": ["error", { builtinGlobals: false }] },
  },
  { files: ["tests/scripts/*.mjs"], languageOptions: { globals: globals.node } },
];
