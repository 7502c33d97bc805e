// Send a request and show its response; both for inspection: the JSON, and the request as curl and Python.
//
// A request is {path, body} with a value for JSON, {path, file} with bytes, or {path, form, file}.
// Images in JSON are data: URLs: they are shown shortened, and the commands read them from files.

import { call, hasKey } from "./api.js";
import { button, copyButton, element, seconds } from "./dom.js";
import { fileNameOf } from "./files.js";

const MAX_CHARS = 400; // of a shown string
const MAX_NUMBERS = 12; // of a shown list

// Returns what `show` makes of the response's document, the texts of `notes` with the server's timings,
// and the exchange.
export async function ask(request, show, notes = () => []) {
  const response = await call(request.path, { body: request.form ? formData(request) : request.body ?? request.file });
  const result = await response.json();
  const note = [...notes(result), ...timings(response)].filter(Boolean).join(" · ");
  return [...await show(result), element("p", { class: "note" }, note), exchange(request, () => result)];
}

function formData({ form, file }) {
  const data = new FormData();
  for (const [name, value] of Object.entries(form)) data.append(name, value);
  data.append("file", file, file.name);
  return data;
}

function timings({ headers }) {
  const matches = (headers.get("server-timing") ?? "").matchAll(/(\w+);dur=([\d.]+)/g);
  const { queue, batch = 0, model } = Object.fromEntries([...matches].map(([, name, ms]) => [name, ms / 1000]));
  const size = headers.get("x-batch-size");
  return [
    model !== undefined && `${seconds(model)} in the model`,
    queue !== undefined && `${seconds(queue + batch)} waiting`,
    size && `batch of ${size}`,
  ];
}

export function exchange(request, responseDocument) {
  const views = {
    Request: () => request.body ? json(request.body) : describeUpload(request),
    Response: () => json(responseDocument()),
    curl: () => asCurl(request),
    Python: () => asPython(request),
  };
  const text = element("pre", { tabindex: "0" });
  const buttons = Object.entries(views).map(([name, view]) => button(name, event => {
    buttons.forEach(other => other.setAttribute("aria-pressed", other === event.currentTarget));
    text.textContent = view();
  }, { "aria-pressed": "false" }));
  const copy = copyButton(() => text.textContent);
  const details = element("details", { class: "exchange" },
    element("summary", {}, "Request and response"),
    element("div", { class: "toolbar" }, ...buttons, copy), text);
  details.ontoggle = () => {
    if (details.open && !text.textContent) buttons[0].click();
  };
  return details;
}

// ── JSON ──

export function json(value) {
  return JSON.stringify(value, shortened, 2) ?? "";
}

function shortened(key, value) {
  if (typeof value === "string" && value.length > MAX_CHARS) {
    return `${value.slice(0, 40)}… (${value.length.toLocaleString("en")} characters)`;
  }
  const isLong = Array.isArray(value) && value.length > MAX_NUMBERS && typeof value[0] === "number";
  return isLong ? [...value.slice(0, 4), `… ${value.length - 4} more numbers`] : value;
}

// Throws an error that begins with `subject`.
export function parseJson(text, subject, revive) {
  try {
    return JSON.parse(text, revive);
  } catch (error) {
    throw new Error(`${subject} not valid JSON: ${error.message}`);
  }
}

function describeUpload({ file, form }) {
  const fields = Object.entries(form ?? {}).map(([name, value]) => `${name}: ${value}\n`).join("");
  return `${fields}${form ? "file: " : ""}${file.name}, ${file.type}, ${file.size.toLocaleString("en")} bytes`;
}

// ── commands ──

function address(path) {
  return new URL(path, document.baseURI).href;
}

export function asCurl(request) {
  const args = [`curl ${quoted(address(request.path))}`];
  if (hasKey()) args.push('-H "Authorization: Bearer $API_KEY"');
  if (request.form) {
    for (const [name, value] of Object.entries(request.form)) args.push(`-F ${quoted(`${name}=${value}`)}`);
    args.push(`-F ${quoted(`file=@${request.file.name}`)}`);
  } else if (request.file) {
    args.push(`-H ${quoted(`content-type: ${request.file.type}`)}`);
    args.push(`--data-binary ${quoted(`@${request.file.name}`)}`);
  } else {
    args.push("-H 'content-type: application/json'");
    const text = JSON.stringify(request.body, null, 2);
    args.push(text.includes('"data:') ? `-d @- <<END\n${withFiles(text)}\nEND` : `-d ${quoted(text)}`);
  }
  return args.join(" \\\n  ");
}

const quoted = text => `'${text.replaceAll("'", "'\\''")}'`;

// Escapes JSON for a here-document in which the shell inserts files.
function withFiles(text) {
  return text.replace(/[\\$`]/g, "\\$&").replace(/"data:([\w/+.-]+);base64,[^"]*"/g, (url, media) =>
    `"data:${media};base64,$(base64 < ${quoted(fileNameOf(url.slice(1, -1)))} | tr -d '\\n')"`);
}

const SDK = {
  "v1/chat/completions": "chat.completions.create",
  "v1/embeddings": "embeddings.create",
  "v1/audio/transcriptions": "audio.transcriptions.create",
};

export function asPython({ path, body, form, file }) {
  const create = SDK[path];
  const usesUrls = JSON.stringify(body ?? "").includes('"data:');
  const imports = [hasKey() && "import os\n", usesUrls && "import base64\n"].filter(Boolean);
  if (imports.length) imports.push("\n");
  imports.push(create ? "from openai import OpenAI\n\n" : "import httpx\n\n", usesUrls ? DATA_URL : "");
  if (create) imports.push(`client = OpenAI(base_url="${address("v1")}", api_key=${hasKey() ? 'os.environ["API_KEY"]' : '"none"'})\n`);
  const args = (create ? sdkArguments(body ?? form, file) : httpxArguments(path, body, file)).map(arg => `    ${arg},\n`);
  const print = create ? "print(response)" : "print(response.json())";
  return `${imports.join("")}response = ${create ? `client.${create}` : "httpx.post"}(
${args.join("")})
${body?.stream ? CHUNKS : print}
`;
}

const DATA_URL = `
def data_url(media, name):
    return f"data:{media};base64,{base64.b64encode(open(name, 'rb').read()).decode()}"


`;
const CHUNKS = `for chunk in response:
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)`;

function sdkArguments(fields, file) {
  const args = Object.entries(fields).filter(([, value]) => value !== undefined).map(([name, value]) => `${name}=${literal(value)}`);
  return file ? [...args, `file=${opened(file)}`] : args;
}

function httpxArguments(path, body, file) {
  const headers = [
    hasKey() && '"authorization": f"Bearer {os.environ[\'API_KEY\']}"',
    file && `"content-type": ${JSON.stringify(file.type)}`,
  ].filter(Boolean).join(", ");
  const content = file ? `content=${opened(file)}` : `json=${literal(body)}`;
  return [`"${address(path)}"`, content, ...(headers ? [`headers={${headers}}`] : []), "timeout=60"];
}

const opened = ({ name }) => `open(${JSON.stringify(name)}, "rb")`;

const CONSTANTS = { null: "None", true: "True", false: "False" };

// Returns a Python literal: JSON with other constants, and without the bytes of files. The expression does not
// backtrack within a string: it may be a file of many MB.
function literal(value) {
  return JSON.stringify(value, null, 4).replace(/"[^"\\]*(?:\\.[^"\\]*)*"|null|true|false/g, token => {
    const url = /^"data:([\w/+.-]+);base64,/.exec(token);
    return url ? `data_url("${url[1]}", ${JSON.stringify(fileNameOf(JSON.parse(token)))})` : CONSTANTS[token] ?? token;
  }).replaceAll("\n", "\n    ");
}
