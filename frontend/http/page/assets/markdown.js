// Answers as Markdown. markdown-it only parses: elements are made of its tokens here, so no text ever becomes HTML.

const parser = markdownit({ linkify: true });
parser.linkify.set({ fuzzyLink: false, fuzzyEmail: false }); // `main.py` is a file
parser.validateLink = (url) => /^(https?:|mailto:)/i.test(url);

function link(href, ...children) {
  return Object.assign(element("a", ...children), { href, title: href, target: "_blank", rel: "noopener noreferrer" });
}

function codeBlock(code, language) {
  const text = Object.assign(element("pre", element("code", code)), { tabIndex: 0 }); // the keyboard scrolls it
  return element("figure.code", element("figcaption", language, element("button.copy", "Copy")), text);
}

/** Append the elements of markdown-it's tokens. Images become links: loading one would tell its server of the reader. */
function append(parent, tokens) {
  for (const token of tokens) {
    if (token.hidden) continue; // the paragraph of a tight list's item
    const { type, tag, content } = token;
    if (token.nesting < 0) parent = parent.parentNode;
    else if (type === "inline") append(parent, token.children);
    else if (type === "text") parent.append(content);
    else if (type === "softbreak") parent.append(element("br"));
    else if (type === "code_inline") parent.append(element("code", content));
    else if (tag === "code") parent.append(codeBlock(content, token.info));
    else if (type === "image") parent.append(link(token.attrGet("src"), `image: ${content || token.attrGet("src")}`));
    else {
      const name = tag.replace(/^h(\d)/, (_, level) => `h${Math.min(+level + 3, 6)}`); // below the page's headings
      const made = type === "link_open" ? link(token.attrGet("href")) : element(name);
      if (token.attrGet("start")) made.start = token.attrGet("start");
      parent.append(made);
      if (token.nesting > 0) parent = made;
    }
  }
}

/** Text that grows, shown as Markdown. Showing a long one takes at most a fifth of the time. */
class Markdown {
  data = "";
  element = element("div.answer");
  #pause = 16;
  #timer = 0;

  add(text) {
    this.data += text;
    if (text) this.#timer ||= setTimeout(() => followLog(() => this.show()), this.#pause);
  }

  /** Blocks that have not changed stay, and with them what is selected or scrolled there. */
  show() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const began = performance.now(), whole = element("div"), { childNodes: shown } = this.element;
    append(whole, parser.parse(this.data, {}));
    let kept = 0;
    for (; kept < shown.length && whole.firstChild?.isEqualNode(shown[kept]); kept++) whole.firstChild.remove();
    while (shown.length > kept) this.element.lastChild.remove();
    this.element.append(...whole.childNodes);
    this.#pause = Math.max(16, 4 * (performance.now() - began));
  }
}

/** Copy the code beside the button, by selecting it: the clipboard's own API needs https. */
byId("messages").addEventListener("click", ({ target }) => {
  if (!target.matches(".copy")) return;
  getSelection().selectAllChildren(target.closest("figure").lastChild);
  target.textContent = document.execCommand("copy") ? "Copied" : "Selected";
});
