// A chat over /v1/chat/completions. The key and the conversation exist only as variables of this page.

let key = "";
let answering = null; // AbortController of the answer in progress
let conversation = [];

const headers = () => ({ "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) });

function showError(text) {
  byId("error").textContent = text;
  byId("error").hidden = !text;
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
  const names = (await response.json()).data.map((model) => model.id);
  byId("models").replaceChildren(...names.map((name) => new Option(name, name)));
  byId("model").textContent = names[0];
  byId("login").hidden = true;
  showError("");
}

/** Add a message to the log and return the parts that may grow. */
function addMessage(role, text) {
  byId("empty").hidden = true;
  const thoughts = new Text(), answer = new Text(text), note = element("p");
  const folded = element("details", element("summary", "Thoughts"), element("div", thoughts));
  folded.lastChild.className = "text";
  folded.hidden = true;
  const shown = element("div", answer);
  shown.className = "text";
  note.className = "note";
  const whole = element("article", element("h3", role === "user" ? "You" : "Model"), folded, shown, note);
  whole.className = `message ${role}`;
  byId("messages").append(whole);
  return { thoughts, folded, answer, note, whole };
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
  const body = {
    model: byId("models").value || undefined, messages, stream: true,
    stream_options: { include_usage: true },
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
        shown.answer.appendData(choice.delta.content || "");
        shown.folded.hidden = !shown.thoughts.length;
      });
    }
  }
  if (!isWhole) throw new Error("the answer was cut off");
  const seconds = (performance.now() - began) / 1000;
  const ended = { stop: "", length: ", cut at its limit of tokens" }[finish] ?? `, ended with ${finish}`;
  return `${usage ? `${number(usage.completion_tokens)} tokens in ` : ""}${seconds.toFixed(1)} s${ended}`;
}

async function send() {
  const text = byId("text").value.trim();
  if (!text || answering) return;
  showError("");
  byId("text").value = "";
  const messages = conversation; // "New chat" begins another one
  messages.push({ role: "user", content: text });
  const own = addMessage("user", text);
  const shown = addMessage("assistant", "");
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
  busy(false);
  if (shown.answer.length) {
    messages.push({ role: "assistant", content: shown.answer.data });
    return;
  }
  messages.pop(); // not answered: templates want turns
  if (!shown.thoughts.length && messages === conversation) {
    own.whole.remove();
    shown.whole.remove();
    byId("text").value = byId("text").value || text;
  }
}

function busy(is) {
  byId("send").hidden = is;
  byId("stop").hidden = !is;
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
byId("clear").addEventListener("click", () => {
  stop();
  conversation = [];
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
