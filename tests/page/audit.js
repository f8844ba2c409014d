// What is wrong with the page for those who cannot see or point; rules as axe has them, in short: names of controls,
// labels of fields, ids, headings, contrast. A function for Playwright's evaluate.
() => {
    const found = [];
    const visible = node => node.checkVisibility({ visibilityProperty: true, opacityProperty: false })
        && !node.closest("[inert], [aria-hidden=true]");
    const nameOf = node => (node.getAttribute("aria-label") || (node.getAttribute("aria-labelledby") ?? "").split(" ")
        .map(id => document.getElementById(id)?.textContent ?? "").join(" ").trim()
        || [...(node.labels ?? [])].map(label => label.textContent).join(" ") || node.textContent || node.title).trim();
    for (const node of document.querySelectorAll("button, a[href], input, textarea, select, [role=img], [role=meter], [role=region], dialog, nav, aside"))
        if (visible(node) && !nameOf(node)) found.push("no name: " + node.outerHTML.slice(0, 90));
    const ids = [...document.querySelectorAll("[id]")].map(node => node.id);
    for (const id of ids) if (ids.indexOf(id) !== ids.lastIndexOf(id)) found.push("id twice: " + id);
    for (const node of document.querySelectorAll("[aria-controls], [aria-describedby], [aria-labelledby]"))
        for (const name of ["aria-controls", "aria-describedby", "aria-labelledby"])
            for (const id of (node.getAttribute(name) ?? "").split(" ").filter(Boolean))
                if (!document.getElementById(id)) found.push(name + " leads nowhere: " + id);
    if (document.querySelectorAll("h1").length !== 1) found.push("not one h1");
    if (!document.documentElement.lang) found.push("no language");
    const number = text => text.match(/[\d.]+/g).map(Number);
    const light = ([r, g, b]) => [r, g, b].map(v => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, k) => sum + v * [0.2126, 0.7152, 0.0722][k], 0);
    const ground = node => {
        for (; node; node = node.parentElement) {
            const parts = number(getComputedStyle(node).backgroundColor);
            if (parts.length < 4 || parts[3] > 0) return parts;
        }
        return [255, 255, 255];
    };
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    for (let text = walker.nextNode(); text; text = walker.nextNode()) {
        const node = text.parentElement;
        if (!text.data.trim() || !visible(node) || node.closest(".sr-only, .skip, :disabled, noscript")) continue;
        const style = getComputedStyle(node);
        const [a, b] = [light(number(style.color)), light(ground(node))].sort((x, y) => y - x);
        const big = parseFloat(style.fontSize) >= 24 || (parseFloat(style.fontSize) >= 18.66 && style.fontWeight >= 700);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < (big ? 3 : 4.5)) found.push(`contrast ${ratio.toFixed(2)}: ${text.data.trim().slice(0, 40)}`);
    }
    return found;
}
