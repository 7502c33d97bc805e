// The entry point of GET /docs: renders openapi.json. An operation's fields are rendered when it is opened, and
// those of a struct within them when that is, so structs may contain themselves.

import { call, showForgetKey } from "./api.js";
import { element, failure, find } from "./dom.js";

const NOT_IMPLEMENTED = "Not implemented";
const LIMITS = { // keywords of JSON schema
  minimum: "≥", exclusiveMinimum: ">", maximum: "≤", exclusiveMaximum: "<", minLength: "characters ≥",
  maxLength: "characters ≤", minItems: "items ≥", maxItems: "items ≤", maxProperties: "entries ≤",
};

let api = null; // the document

async function start() {
  showForgetKey();
  try {
    api = await (await call("openapi.json")).json();
  } catch (error) {
    find("#operations").replaceChildren(failure(error, start));
    return;
  }
  find("#state .text").textContent = api.info.version;
  find("#operations").replaceChildren(...api.tags.map(tag => tagSection(tag.name)));
  find("#filter").oninput = showMatches;
  openFromAddress();
  window.addEventListener("hashchange", openFromAddress);
}

function tagSection(name) {
  const operations = Object.entries(api.paths).flatMap(([path, methods]) =>
    Object.entries(methods).filter(([, { tags }]) => tags.includes(name))
      .map(([method, operation]) => operationDetails(method, path, operation)));
  return element("section", { class: "tag" }, element("h2", {}, name), operations);
}

function operationDetails(method, path, operation) {
  const details = lazyDetails("operation", [
    element("span", { class: "method" }, method.toUpperCase()), element("code", {}, path),
    element("span", { class: "note" }, operation.summary),
  ], () => element("div", {}, operationParts(operation)));
  details.id = operation.operationId;
  details.dataset.words = [path, operation.summary, ...fieldNames(operation)].join(" ").toLowerCase();
  return details;
}

// Returns <details> whose content is made when they are first opened.
function lazyDetails(kind, summary, content) {
  const details = element("details", { class: kind }, element("summary", {}, summary));
  details.addEventListener("toggle", () => details.append(content()), { once: true });
  return details;
}

function operationParts({ parameters = [], requestBody, responses }) {
  const { 200: success, ...errors } = responses;
  return [
    ...part("Parameters", parameters.length ? [fieldList(parameters)] : []),
    ...contents("Request", requestBody?.content),
    ...contents("Response", success.content),
    ...part("Errors", [element("dl", { class: "fields" }, Object.entries(errors).map(([status, reference]) =>
      element("div", {}, element("dt", {}, element("code", {}, status)),
        element("dd", {}, resolve(reference).description))))]),
  ];
}

function part(title, nodes) {
  return nodes.length ? [element("div", {}, element("h3", {}, title), nodes)] : [];
}

// Returns a part for each media type of a body.
function contents(title, content = {}) {
  return Object.entries(content).flatMap(([media, { schema = {} }]) =>
    part(`${title} · ${media}`, schemaNodes(schema)));
}

function schemaNodes(schema) {
  const { properties, required = [], description } = resolve(schema);
  if (properties) {
    return [fieldList(Object.entries(properties).map(([name, field]) =>
      ({ name, schema: field, required: required.includes(name) })))];
  }
  return [
    element("p", { class: "note" }, [typeText(schema), description].filter(Boolean).join(" · ")),
    ...structs(schema).map(nested),
  ];
}

// Returns a list of fields, the required ones first; those that are not implemented are one line at the end.
function fieldList(fields) {
  const isServed = ({ schema }) => !schema.description?.startsWith(NOT_IMPLEMENTED);
  const served = fields.filter(isServed).sort((a, b) => Boolean(b.required) - Boolean(a.required));
  const refused = fields.filter(field => !isServed(field)).map(({ name }) => name);
  return element("dl", { class: "fields" }, served.map(fieldEntry), refused.length
    ? element("div", {}, element("dt", { class: "note" }, NOT_IMPLEMENTED), element("dd", {}, refused.join(", "))) : null);
}

function fieldEntry({ name, schema, required }) {
  const text = schema.description ?? resolve(schema).description;
  const isSet = schema.default !== undefined && schema.default !== null;
  return element("div", {},
    element("dt", {}, element("code", {}, name),
      element("span", { class: "note" }, typeText(schema) + (isSet ? ` · default ${JSON.stringify(schema.default)}` : "")),
      required ? element("strong", {}, "required") : null),
    element("dd", {}, text ?? "", structs(schema).map(nested)));
}

function nested(name) {
  return lazyDetails("nested", [name], () => schemaNodes({ $ref: `#/components/schemas/${name}` })[0]);
}

// ── schemas ──

function resolve(schema) {
  if (!schema.$ref) return schema;
  return schema.$ref.slice(2).split("/").reduce((node, key) => node[key], api);
}

// Returns the type in words: "integer (≥ 1, ≤ 128)", "list of Message". A null type is left out: it
// is the same as no field.
function typeText(schema) {
  if (schema.$ref) return schema.$ref.split("/").at(-1);
  const limits = Object.keys(LIMITS).filter(name => Math.abs(schema[name]) <= Number.MAX_SAFE_INTEGER)
    .map(name => `${LIMITS[name]} ${schema[name]}`);
  return baseType(schema) + (limits.length ? ` (${limits.join(", ")})` : "");
}

function baseType(schema) {
  const choices = schema.anyOf ?? schema.oneOf;
  if (choices) return [...new Set(choices.map(typeText))].filter(text => text !== "null").join(" or ");
  if (schema.enum) return schema.enum.filter(value => value !== null).map(value => JSON.stringify(value)).join(", ");
  if ("const" in schema) return JSON.stringify(schema.const);
  if (schema.type === "array") return schema.items ? `list of ${typeText(schema.items)}` : "list";
  if (schema.format === "binary") return "file";
  return [schema.type ?? "any"].flat().join(" or ");
}

// Returns the names of the structs in a schema that have fields.
function structs(schema) {
  if (schema.$ref) return resolve(schema).properties ? [schema.$ref.split("/").at(-1)] : [];
  const parts = [...schema.anyOf ?? [], ...schema.oneOf ?? [], schema.items, schema.additionalProperties];
  return [...new Set(parts.filter(node => node instanceof Object).flatMap(structs))];
}

function fieldNames({ parameters = [], requestBody }) {
  const schemas = Object.values(requestBody?.content ?? {}).map(({ schema }) => resolve(schema));
  return [...parameters.map(({ name }) => name), ...schemas.flatMap(({ properties = {} }) => Object.keys(properties))];
}

// ── what is shown ──

function showMatches() {
  const words = find("#filter").value.trim().toLowerCase();
  for (const section of document.querySelectorAll(".tag")) {
    const operations = [...section.querySelectorAll(".operation")];
    for (const operation of operations) operation.hidden = !operation.dataset.words.includes(words);
    section.hidden = operations.every(({ hidden }) => hidden);
  }
}

function openFromAddress() {
  const operation = document.getElementById(location.hash.slice(1));
  if (!operation) return;
  operation.open = true;
  operation.scrollIntoView();
}

start();
