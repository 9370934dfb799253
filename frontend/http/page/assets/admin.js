// Tenants and requests from /admin/state, with the administrator's key, while the section is open.

const MAX_LISTED = 8;
let adminKey = "";

async function pollState() {
  if (!adminKey || !byId("admin").open) return;
  const response = await fetch("admin/state", { headers: { authorization: `Bearer ${adminKey}` } });
  byId("admin-state").hidden = !response.ok;
  byId("admin-login").hidden = response.ok;
  if (!response.ok) {
    const noRoutes = response.status === 404 ? "the server has no administrator's key (--admin-api-key)" : "";
    if (response.status !== 503) adminKey = "";
    return showError(noRoutes || (await refusal(response)), "admin-error");
  }
  showError("", "admin-error");
  const state = await response.json();
  byId("tenants").replaceChildren(...state.tenants.map((each) =>
    row(String(each.tenant), number(each.running), number(each.waiting), number(each.kv_blocks))));
  byId("requests").replaceChildren(...state.requests.slice(0, MAX_LISTED).map((each) => {
    const id = element("small", each.id);
    const adapter = each.adapter ? `, adapter ${each.adapter}` : "";
    const shown = element("span", (each.reason ? `${each.state} (${each.reason})` : each.state) + adapter, id);
    id.title = each.id;
    const tokens = `${number(each.prompt_tokens)}+${number(each.output_tokens)}`;
    return row(shown, String(each.tenant), each.seconds.toFixed(1), tokens, number(each.kv_blocks));
  }));
}

byId("admin-login").addEventListener("submit", (event) => {
  event.preventDefault();
  adminKey = byId("admin-key").value.trim();
  byId("admin-key").value = "";
  pollState().catch(() => showError("the server does not answer", "admin-error"));
});
