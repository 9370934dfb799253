"use strict";
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const page = document.querySelector("rapi-doc");
page.setAttribute("theme", dark ? "dark" : "light");
