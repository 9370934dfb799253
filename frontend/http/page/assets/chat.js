// A chat over /v1/chat/completions. The key and the conversation exist only as variables of this page.

let key = "";
let answering = null; // AbortController of the answer in progress
let conversation = [];
let answered = null; // the article of the conversation's last answer, if it is also the last in the log

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

function showError(text, id = "error") {
  byId(id).textContent = text;
  byId(id).hidden = !text;
}

/** Return the message of a response that is not 200. */
async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered with status ${response.status}`;
  }
}

async function loadModels() {
  let response;
  try {
    response = await fetch("v1/models", { headers: headers() });
  } catch {
    return showError("the server does not answer");
  }
  if (!response.ok) {
    if (response.status === 401) {
      byId("login").hidden = false;
      byId("key").focus();
    }
    return showError(response.status === 401 && !key ? "" : await refusal(response));
  }
  const models = (await response.json()).data, names = models.map((model) => model.id);
  byId("attach").hidden = !models[0].input_modalities.includes("image");
  byId("models").replaceChildren(...names.map((name) => new Option(name, name)));
  byId("model").textContent = names[0];
  byId("login").hidden = true;
  showError("");
}

/** Append an article to the log and return it. */
function addMessage(role, ...content) {
  byId("empty").hidden = true;
  const whole = element(`article.message.${role}`, element("h3", role === "user" ? "You" : "Model"), ...content);
  byId("messages").append(whole);
  return whole;
}

/** Add an empty answer to the log and return the parts that may grow. */
function addAnswer() {
  const thoughts = new Text(), answer = new Markdown(), note = element("p.note");
  const folded = element("details", element("summary", "Thoughts"), element("div.text", thoughts));
  folded.hidden = true;
  return { thoughts, folded, answer, note, whole: addMessage("assistant", folded, answer.element, note) };
}

/** Keep the end of the log in view, unless the reader has scrolled up. */
function followLog(change) {
  const log = byId("messages");
  const atEnd = log.scrollTop + log.clientHeight >= log.scrollHeight - 40;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

/** Yield the data of the events of a response. */
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data: ")) yield line.slice("data: ".length);
  }
}

/** Stream the answer into `shown`; return how it ended. Throws if it was not whole. */
async function stream(messages, shown, signal) {
  const system = byId("system").value.trim(), temperature = byId("temperature").value;
  const body = {
    model: byId("models").value || undefined, stream: true, stream_options: { include_usage: true },
    messages: system ? [{ role: "system", content: system }, ...messages] : messages,
    temperature: temperature ? Number(temperature) : undefined,
  };
  const began = performance.now();
  const response = await fetch("v1/chat/completions", {
    method: "POST", headers: headers(), body: JSON.stringify(body), signal,
  });
  if (response.status === 401) byId("login").hidden = false;
  if (!response.ok) throw new Error(await refusal(response));
  let finish = "", usage = null, isWhole = false;
  for await (const data of events(response)) {
    if (data === "[DONE]") {
      isWhole = true;
      break;
    }
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    usage = event.usage || usage;
    for (const choice of event.choices || []) {
      finish = choice.finish_reason || finish;
      followLog(() => {
        shown.thoughts.appendData(choice.delta.reasoning || "");
        shown.answer.add(choice.delta.content || "");
        shown.folded.hidden = !shown.thoughts.length;
      });
    }
  }
  if (!isWhole) throw new Error("the answer was cut off");
  const seconds = (performance.now() - began) / 1000;
  const ended = { stop: "", length: ", cut at its limit of tokens" }[finish] ?? `, ended with ${finish}`;
  return `${usage ? `${number(usage.completion_tokens)} tokens in ` : ""}${seconds.toFixed(1)} s${ended}`;
}

/** Stream an answer to the conversation; call `undo` if there is none. */
async function answer(undo) {
  const messages = conversation; // "New chat" begins another one
  showError("");
  const shown = addAnswer();
  byId("messages").scrollTop = byId("messages").scrollHeight;
  const mine = answering = new AbortController();
  busy(true);
  try {
    shown.note.textContent = await stream(messages, shown, mine.signal);
  } catch (error) {
    if (!mine.signal.aborted) showError(error.message);
    shown.note.textContent = mine.signal.aborted ? "stopped" : "incomplete";
  }
  answering = null;
  followLog(() => shown.answer.show());
  if (shown.answer.data) {
    messages.push({ role: "assistant", content: shown.answer.data });
    if (messages === conversation) answered = shown.whole;
  } else undo(messages, shown);
  busy(false);
}

function send() {
  const text = byId("text").value.trim();
  if (!(text || attached.length) || answering) return;
  const images = attached, parts = images.map(({ url }) => ({ type: "image_url", image_url: { url } }));
  byId("text").value = "";
  setAttached([]);
  conversation.push({ role: "user", content: parts.length ? [...parts, { type: "text", text }] : text });
  const own = addMessage("user", ...images.map(picture), element("div.text", text));
  answer((messages, { thoughts, whole }) => {
    messages.pop(); // templates want turns
    if (messages !== conversation) return;
    if (thoughts.length) answered = null;
    else {
      own.remove();
      whole.remove();
      byId("text").value = byId("text").value || text;
      if (!attached.length) setAttached(images);
    }
  });
}

/** Answer the last message once more. The old answer comes back if there is no new one. */
function regenerate() {
  const old = answered, said = conversation.pop();
  old.remove();
  byId("text").focus(); // the button is about to be hidden
  answer((messages, { whole }) => {
    messages.push(said);
    whole.replaceWith(old);
  });
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
  byId("again").hidden = is || !answered;
  byId("messages").setAttribute("aria-busy", String(is));
}

function stop() {
  if (!answering) return;
  answering.abort();
  byId("text").focus();
}

byId("compose").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stop();
});
byId("stop").addEventListener("click", stop);
byId("again").addEventListener("click", regenerate);
byId("clear").addEventListener("click", () => {
  stop();
  conversation = [];
  answered = null;
  byId("again").hidden = true;
  for (const message of byId("messages").querySelectorAll("article")) message.remove();
  byId("empty").hidden = false;
  showError("");
  byId("text").focus();
});
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  loadModels();
});

follow();
loadModels();
