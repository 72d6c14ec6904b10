// A small chat, to see what is reused; and the lines that point an agent here.

import { Refused, events, stream } from "./api.js";
import { bar, code, fill, h, section } from "./dom.js";
import { count, decimal, seconds } from "./format.js";
import { cacheWords } from "./now.js";

const MOST_IMAGE_BYTES = 20 << 20;

const kept = { chats: [[]], at: 0, system: "" };

export function open(root, page) {
  let abort = null;
  let images = [];
  const log = h("div", { class: "chat", role: "log", "aria-label": "Conversation", "aria-live": "polite" });
  const text = h("textarea", { id: "say", rows: 3, placeholder: "Say something", onkeydown: (event) => { if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); send(); } } });
  const file = h("input", { type: "file", id: "image", accept: "image/png,image/jpeg,image/webp,image/gif", multiple: true, onchange: attach });
  const attached = h("p", { class: "quiet", role: "status" });
  const button = h("button", { type: "submit", class: "main" }, "Send");
  const system = h("textarea", { id: "system", rows: 2, oninput: () => { kept.system = system.value; } });
  system.value = kept.system;
  const tabs = h("div", { class: "chats", role: "group", "aria-label": "Conversations" });
  const form = h("form", { class: "say", onsubmit: (event) => { event.preventDefault(); abort ? abort.abort() : send(); } },
    h("label", { for: "say", class: "hidden" }, "Message"), text,
    h("div", { class: "row" }, h("label", { for: "image" }, "Images"), file, button), attached);

  root.append(
    h("p", { class: "quiet" }, "Two conversations here, by turns, show a switch: each finds its state again. No tools, and nothing is kept when you leave."),
    tabs,
    h("details", { class: "system" }, h("summary", {}, "System message"), h("label", { for: "system", class: "hidden" }, "System message"), system),
    log, form, section("Point an agent here", agents(location.origin)));

  function draw() {
    fill(tabs, kept.chats.map((_, i) => h("button", { type: "button", "data-key": `chat-${i}`, "aria-pressed": String(i === kept.at), disabled: abort !== null, onclick: () => { kept.at = i; draw(); } }, String.fromCharCode(65 + i))),
      h("button", { type: "button", "data-key": "chat-new", disabled: abort !== null || kept.chats.length >= 8, onclick: () => { kept.chats.push([]); kept.at = kept.chats.length - 1; draw(); text.focus(); } }, "New"));
    const chat = kept.chats[kept.at];
    fill(log, chat.length ? chat.map(shown) : h("p", { class: "empty" }, "Nothing was said yet."));
    button.textContent = abort ? "Stop" : "Send";
  }

  function shown(message) {
    return h("article", { class: `said ${message.role}` },
      h("h3", {}, message.role === "user" ? "You" : "Model"),
      message.thought ? h("details", {}, h("summary", {}, "Thinking"), h("p", { class: "text quiet" }, message.thought)) : null,
      h("p", { class: "text" }, message.text),
      message.images?.length ? h("div", { class: "images" }, message.images.map((url, i) => h("img", { src: url, alt: `Image ${i + 1}` }))) : null,
      message.stopped ? h("p", { class: "stopped" }, "Stopped.") : null,
      message.error ? h("p", { class: "notice bad" }, message.error) : null,
      message.cache ? cacheLine(message.cache) : null,
      message.progress ? h("p", { class: "quiet" }, `Reading ${count(message.progress.processed)} of ${count(message.progress.total)} tokens`) : null);
  }

  function cacheLine(told) {
    return h("footer", {}, h("p", {}, h("b", {}, cacheWords(told.cache)), `: ${count(told.reused)}${told.prompt === null ? "" : ` of ${count(told.prompt)}`} tokens reused`,
      told.first_s === null ? "" : `, first token after ${seconds(told.first_s)}`, told.speed ? `, ${decimal(told.speed)} tokens/s` : ""),
      told.prompt === null ? null : bar("Prompt", [["reused", told.reused, "c-reused"], ["read", told.prompt - told.reused, "c-read"]], told.prompt, count),
      told.why ? h("p", { class: "why" }, told.why) : null);
  }

  async function attach() {
    images = [];
    const tooLarge = [...file.files].filter((each) => each.size > MOST_IMAGE_BYTES);
    for (const each of file.files) if (each.size <= MOST_IMAGE_BYTES) images.push(await dataUrl(each));
    fill(attached, images.length ? `${images.length} attached. ` : "", tooLarge.length ? `${tooLarge.map((each) => each.name).join(", ")}: larger than 20 MiB.` : "");
  }

  async function send() {
    const words = text.value.trim();
    if (abort || (!words && !images.length)) return;
    const chat = kept.chats[kept.at];
    chat.push({ role: "user", text: words, images });
    const answer = { role: "assistant", text: "" };
    text.value = file.value = "";
    images = [];
    fill(attached);
    const messages = [...(kept.system.trim() ? [{ role: "system", content: kept.system }] : []), ...chat.map(sent)];
    chat.push(answer);
    abort = new AbortController();
    draw();
    const began = performance.now();
    let first_s = null;
    try {
      const response = await stream("/v1/chat/completions", {
        model: page.state()?.model ?? "parkd", messages, stream: true, stream_options: { include_usage: true }, return_progress: true,
      }, abort.signal);
      const early = response.headers.get("x-parkd-cache");
      if (early && early !== "pending") answer.cache = { cache: early, why: response.headers.get("x-parkd-why"), reused: Number(response.headers.get("x-parkd-reused-tokens")), prompt: null, first_s: null };
      for await (const data of events(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Refused(500, chunk.error.message);
        const delta = chunk.choices?.[0]?.delta ?? {};
        if (chunk.prompt_progress) {
          answer.progress = chunk.prompt_progress;
          if (answer.cache) answer.cache.prompt = answer.progress.total + 1; // its last token is read with the answer
        }
        if (delta.content || delta.reasoning_content) {
          first_s ??= (performance.now() - began) / 1000;
          answer.progress = null;
        }
        answer.text += delta.content ?? "";
        answer.thought = (answer.thought ?? "") + (delta.reasoning_content ?? "");
        const { timings } = chunk;
        if (timings) answer.cache = { cache: timings.cache, why: timings.why, reused: timings.cache_n, prompt: timings.cache_n + timings.prompt_n, speed: timings.predicted_per_second, first_s };
        log.lastElementChild?.replaceWith(shown(answer));
      }
    } catch (error) {
      answer.stopped = error.name === "AbortError";
      if (!answer.stopped) answer.error = error instanceof Refused ? error.message : "The server does not answer.";
    }
    answer.progress = null;
    abort = null;
    draw();
    text.focus();
  }

  draw();
  return { close() { abort?.abort(); } };
}

function sent(message) {
  if (!message.images?.length) return { role: message.role, content: message.text };
  return { role: message.role, content: [{ type: "text", text: message.text }, ...message.images.map((url) => ({ type: "image_url", image_url: { url } }))] };
}

function dataUrl(file) {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(reader.result);
    reader.onerror = () => failed(reader.error);
    reader.readAsDataURL(file);
  });
}

function agents(origin) {
  const each = [
    ["Claude Code", `ANTHROPIC_BASE_URL=${origin} ANTHROPIC_API_KEY=none ANTHROPIC_MODEL=parkd ANTHROPIC_SMALL_FAST_MODEL=parkd claude`],
    ["Codex", `LOCAL_KEY=none codex -c model_provider=parkd -c model=parkd -c model_providers.parkd.name=parkd -c model_providers.parkd.base_url=${origin}/v1 -c model_providers.parkd.wire_api=responses -c model_providers.parkd.env_key=LOCAL_KEY`],
    ["opencode (opencode.json)", JSON.stringify({ provider: { parkd: { npm: "@ai-sdk/openai-compatible", options: { baseURL: `${origin}/v1` }, models: { parkd: {} } } } }, null, 2)],
    ["Open WebUI, Continue, Cline, Zed, aider: \u201cOpenAI compatible\u201d, any model name, base URL", `${origin}/v1`],
    ["Ollama's API, where a client speaks only that", origin],
  ];
  return h("div", { class: "agents" }, each.map(([name, line]) => h("div", {}, h("h3", {}, name), code(name, line))),
    h("p", { class: "quiet" }, "Where the server asks for a key, put yours in place of \u201cnone\u201d. Tell the agent the context size: its first prompt alone is often 10,000 to 20,000 tokens."));
}
