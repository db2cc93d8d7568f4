-- Recorded output deltas: a list for each stage, by its task's name.
local function pieces_key(name) return P .. ':pieces:' .. name end

local function count_pieces(name) return sound(call, 'LLEN', pieces_key(name)) or 0 end

function verbs.append_deltas()
  local answers, counts = {}, {}
  for i, one in ipairs(A.grown) do
    local name = held(one.claim)
    counts[i] = name and count_pieces(name)
    if name and one.offset > counts[i] then
      return refuse('PROTOCOL output chunks of %s of %s from number %d, but only %d are recorded', one.claim.stage,
        one.claim.request, one.offset, counts[i])
    end
    answers[i] = name and 1 or 0
  end
  for i, one in ipairs(A.grown) do
    if counts[i] and one.offset + #one.pieces > counts[i] then
      local id, stage = one.claim.request, one.claim.stage
      local count = call('RPUSH', pieces_key(name_of(id, stage)), unpack(one.pieces, counts[i] - one.offset + 1))
      publish(id, {type = 'appended', stage = stage, attempt = one.claim.attempt, step = count})
    end
  end
  return answers
end

function verbs.read_deltas()
  if call('EXISTS', request_key(A.id)) == 0 then return unknown(A.id) end
  return sound(call, 'LRANGE', pieces_key(name_of(A.id, A.stage)), A.after, A.after + A.limit - 1) or {}
end
