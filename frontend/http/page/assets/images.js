// The images of the next message: chosen, dropped or pasted. They are data URLs of this page until they are sent.

let attached = []; // { name, url }

/** Return an image as an element. */
const picture = ({ name, url }) => Object.assign(element("img.picture"), { src: url, alt: name });

function setAttached(images) {
  attached = images;
  byId("attached").replaceChildren(...images.map((image) => {
    const remove = element("button.copy", "Remove");
    Object.assign(remove, { type: "button", ariaLabel: `Remove ${image.name}` });
    remove.addEventListener("click", () => {
      setAttached(attached.filter((other) => other !== image));
      byId("text").focus();
    });
    return element("li", picture(image), remove);
  }));
}

const dataUrl = (file) => new Promise((onload, onerror) => {
  const reader = Object.assign(new FileReader(), { onload: () => onload(reader.result), onerror });
  reader.readAsDataURL(file);
});

/** Attach the images among some files. */
async function attach(files) {
  const images = [...files].filter((file) => file.type.startsWith("image/"));
  try {
    const urls = await Promise.all(images.map(dataUrl));
    setAttached([...attached, ...urls.map((url, i) => ({ name: images[i].name, url }))]);
  } catch {
    showError("a file cannot be read");
  }
}

/** Take files from an event with a `transfer` of data, such as a drop, in place of what the browser would do. */
function takeFiles(event, transfer) {
  if (byId("attach").hidden || !transfer.types.includes("Files")) return;
  event.preventDefault();
  attach(transfer.files);
}

byId("attach").addEventListener("click", () => byId("files").click());
byId("files").addEventListener("change", () => {
  attach(byId("files").files);
  byId("files").value = ""; // the same file may be chosen again
});
byId("text").addEventListener("paste", (event) => takeFiles(event, event.clipboardData));
for (const kind of ["dragover", "drop"]) byId("chat").addEventListener(kind, (event) => takeFiles(event, event.dataTransfer));
